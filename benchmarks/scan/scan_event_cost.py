"""Nanoseconds that an event costs: the thread that emits it, while a recorder listens, and the one beside.

Every event is a collective's begin or end with all its attributes, and the
cost is the seam's own call and the recorder's together. Events are emitted in bursts no larger than what
the background thread takes in one go, and between two of them matrices are multiplied: as in a training the
processor is awake, and its caches are full of other things.

On a shared machine the same code takes up to twice as long from one minute to the next: several processes
are asked.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from mt_megatron.scan.format.names import Names
from mt_megatron.scan.record.encoder import SpanEncoder
from mt_megatron.scan.record.levels import Level
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events

ROUNDS, BURST = 60, 1_000
WARM_UP = 40
"""Bursts before those that count: until the background has taken some, every event's memory is new."""
BETWEEN_NS = 20_000_000
SIZE = 1_024
_RANKS = tuple(range(8))


def _pairs(burst: int) -> None:
    for number in range(burst // 2):
        events.begin("collective", op="all_reduce", group="tp", ranks=_RANKS, seq=number, bytes=1 << 20)
        events.end("collective")


def _spans(burst: int) -> None:
    for number in range(burst // 2):
        with events.span("collective", op="all_reduce", group="tp", ranks=_RANKS, seq=number, bytes=1 << 20):
            pass


def _cost(emit: Callable[[int], None]) -> dict[str, float]:
    took, matrix = [], torch.ones(SIZE, SIZE)
    for number in range(-WARM_UP, ROUNDS):
        began = time.perf_counter_ns()
        emit(BURST)
        if number >= 0:
            took.append((time.perf_counter_ns() - began) / BURST)
        until = began + BETWEEN_NS
        while time.perf_counter_ns() < until:
            matrix @ matrix
    return {"cheapest": min(took), "median": statistics.median(took)}


def event_costs(processes: int) -> dict[str, dict[str, float]]:
    """Nanoseconds per event (one begin or one end): ``cheapest`` burst of all processes, ``median`` burst of
    the middle process, and that of the ``slowest`` one."""
    found = []
    for _ in range(processes):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, __file__], env=environment, stdout=subprocess.PIPE, check=True, timeout=300
        )
        found.append(json.loads(done.stdout))
    return {
        name: {
            "cheapest": min(each[name]["cheapest"] for each in found),
            "median": statistics.median(each[name]["median"] for each in found),
            "slowest": max(each[name]["median"] for each in found),
        }
        for name in found[0]
    }


def _costs() -> dict[str, dict[str, float]]:
    """Of this process."""
    torch.set_num_threads(1)
    found = {
        "nobody listens, begin and end": _cost(_pairs),
        "nobody listens, span": _cost(_spans),
    }
    levels: tuple[Level, ...] = ("base", "full")
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            recorder = Recorder(folder, rank=0, level=level)
            recorder.start()
            found[f"{level}, begin and end"] = _cost(_pairs)
            found[f"{level}, span"] = _cost(_spans)
            recorder.close()
            if recorder.failed:
                raise SystemExit(f"the recorder failed: {recorder.failed}")
    found["background: encoding of spans"] = _encoding()
    return found


def _encoding() -> dict[str, float]:
    heard: list[events.Span | events.Moment] = []
    stop = events.record(heard.append, {"collective"})
    encoder = SpanEncoder(Names())
    took = []
    for _ in range(ROUNDS):
        _spans(BURST)
        began = time.perf_counter_ns()
        encoder.feed(heard)
        took.append((time.perf_counter_ns() - began) / BURST)
        heard.clear()
        encoder.out.clear()
    stop()
    return {"cheapest": min(took), "median": statistics.median(took)}


if __name__ == "__main__":
    print(json.dumps(_costs()))
