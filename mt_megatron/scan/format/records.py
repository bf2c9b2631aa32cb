"""What is recorded: spans, counters and clock pings, as fixed-size little-endian records.

Times are nanoseconds of the host clock of the rank that wrote them (``time.perf_counter_ns``, on Linux
``CLOCK_MONOTONIC``); all ranks of one machine share it, other machines' are put right by ``ping``s.
"""

from __future__ import annotations

import numpy as np

FORMAT_VERSION = 1

KINDS = (
    "other",
    "step",
    "data",
    "microbatch",
    "forward",
    "backward",
    "layer",
    "module",
    "collective",
    "p2p",
    "optimizer",
    "checkpoint",
    "kernel",
    "pause",
)
"""What a span is; a record holds the index. ``pause``: garbage collection, a process that stood still, and by
the name ``COMMANDED`` a run that was told to stand still between two steps."""

COMMANDED = "commanded"

KIND = {name: index for index, name in enumerate(KINDS)}

OPEN = -1
"""``end`` of a span that had not ended when it was written. The whole span follows if it ever ends."""

SPAN = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),
        # Device time on the host's clock; 0 where the device's work was not timed.
        ("device_begin", "<i8"),
        ("device_end", "<i8"),
        # Bytes this rank gives into a collective or transfer; -1 where unknown.
        ("bytes", "<i8"),
        # Units of work (tokens) where the caller said so, else 0: tells uneven work from slow work.
        ("work", "<i8"),
        ("iteration", "<i4"),
        # Number among the collectives of its group, or among the transfers of its directed edge and
        # tag, from 0 since the process started and equal on all sides; -1 where nobody counts.
        ("seq", "<i4"),
        # The other side's global rank of a ``p2p`` span, else -1.
        ("peer", "<i4"),
        # String number: "all_reduce", "send", "recv", "layers.3", "AdamW" ...
        ("name", "<u2"),
        # Group number, 0 for none.
        ("group", "<u2"),
        ("microbatch", "<i2"),
        ("chunk", "<i2"),
        ("kind", "u1"),
        ("thread", "u1"),
        ("flags", "<u2"),
    ]
)
"""A piece of time of one rank, 72 bytes. A transfer between stages that sends and receives is one span
each per direction, with the same times."""

ASYNC = 1
"""Flag: only the start of an operation that goes on in the background."""

WAIT = 2
"""Flag: the wait for an operation that was started before."""

COUNTER = np.dtype([("time", "<i8"), ("value", "<f8"), ("name", "<u2"), ("device", "<u2"), ("spare", "<u4")])
"""A host or device fact at one moment, 24 bytes."""

COUNTERS = (
    "beat_delay_ns",
    "run_queue_wait_ns",
    "process_cpu_ns",
    "major_faults",
    "minor_faults",
    "voluntary_switches",
    "involuntary_switches",
    "steal_fraction",
    "throttled_ns",
    "gc_pause_ns",
    "data_queue_depth",
    "checkpoint_bytes",
    "power_w",
    "temperature_c",
    "clock_mhz",
    "utilization_percent",
    "memory_bytes",
    "throttled",
    "dropped_events",
)
"""Names of counters that have a meaning for the diagnosis. Those in ``_ns``, faults and switches count up
since the process started. ``beat_delay_ns``: how much too late the recorder's own thread woke up
since the last record (a stopped process, a starved one); 0 when on time."""

PING = np.dtype(
    [
        ("sent", "<i8"),
        ("received", "<i8"),
        ("answered", "<i8"),
        ("returned", "<i8"),
        ("peer", "<i4"),
        ("spare", "<u4"),
    ]
)
"""Four timestamps of one exchange with rank ``peer``: ``sent`` and ``returned`` by this rank's clock,
``received`` and ``answered`` by the peer's."""

FLUSH_SECONDS = 0.6
"""Time between two writes of a recorder: what a killed process loses at most, and a little more for the
encoding itself."""
