"""What the processes of ``test_durability`` do: a small training, until killed or until the disk is full."""

from __future__ import annotations

import itertools
import logging
import resource
import sys
import time

from mt_megatron.scan.recorder import Recorder
from mt_megatron.seams import events
from tests.scan.recordings import MEMBERS


def work(recorder: Recorder, steps: int | None) -> None:
    """Steps of ten collectives, for ever when ``steps`` is None."""
    for iteration in itertools.count(1) if steps is None else range(1, steps + 1):
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
    work(recorder, None)


def limited(folder: str, most_bytes: str) -> None:
    """A training whose files may not grow beyond ``most_bytes``; prints how far it came."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes), int(most_bytes)))
    full_disk(folder)


def full_disk(folder: str) -> None:
    """A training on a disk that fills up; prints how far it came, and why the tracing ended."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    recorder = Recorder(folder, rank=0)
    recorder.start()
    done = 0
    deadline = time.monotonic() + 60
    while recorder.failed is None and time.monotonic() < deadline:
        work(recorder, 200)
        done += 200
    work(recorder, 50)
    time.sleep(0.5)
    recorder.counter("power_w", 1.0)
    recorder.note(what="x")
    queued = len(recorder._queues.events) + len(recorder._queues.counters) + len(recorder._queues.notes)
    print(done + 50, events.listening(), queued, recorder.failed, flush=True)
    recorder.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
