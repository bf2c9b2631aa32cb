"""What the processes of ``test_durability`` do: a small training, until killed or until the disk is full."""

from __future__ import annotations

import itertools
import logging
import resource
import sys
import time
from collections.abc import Iterable

from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events
from tests.scan.recordings import MEMBERS


def work(steps: Iterable[int]) -> None:
    """Steps of ten collectives."""
    for iteration in steps:
        with events.span("step", iteration=iteration):
            for seq in range(10):
                with events.span("collective", op="all_reduce", group="dp", ranks=MEMBERS, seq=seq, bytes=8):
                    pass
        if iteration % 5 == 0:
            time.sleep(0.005)


def until_killed(folder: str, rank: str) -> None:
    """Trace without end; small segments, so that one is often just beginning."""
    recorder = Recorder(folder, rank=int(rank), most_bytes=4 << 20)
    recorder.start()
    print("ready", flush=True)
    work(itertools.count(1))


def limited(folder: str, most_bytes: str) -> None:
    """A training whose files may not grow beyond ``most_bytes``; prints how far it came."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes), int(most_bytes)))
    full_disk(folder)


def full_disk(folder: str) -> None:
    """A training on a disk that fills up; prints how far it came, and why the tracing ended."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    recorder = Recorder(folder, rank=0)
    recorder.start()
    deadline = time.monotonic() + 60
    # Something is written before the disk is full, however slow this machine is.
    work(range(1, 21))
    while recorder._queues.events and time.monotonic() < deadline:
        time.sleep(0.02)
    done = 20
    while recorder.failed is None and time.monotonic() < deadline:
        work(range(done + 1, done + 201))
        done += 200
    work(range(done + 1, done + 51))
    time.sleep(0.5)
    recorder.counter("power_w", 1.0)
    recorder.note(what="x")
    queued = len(recorder._queues.events) + len(recorder._queues.counters) + len(recorder._queues.notes)
    print(done + 50, events.listening(), queued, recorder.failed, flush=True)
    recorder.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
