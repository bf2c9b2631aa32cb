"""Cost of an event: nanoseconds per begin/end pair, idle and with one listener.

    python benchmarks/scan/events_cost.py [--json]

The cheapest of several rounds, minus an empty loop's; one thread, garbage collection off.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable

from mt_megatron.seams import events

ROUNDS, CALLS = 15, 100_000


def _empty() -> None:
    for _ in range(CALLS):
        pass


def _pair() -> None:
    for _ in range(CALLS):
        events.begin("layer", number=1)
        events.end("layer")


def _span() -> None:
    for _ in range(CALLS):
        with events.span("layer", number=1):
            pass


def _check() -> None:
    for _ in range(CALLS):
        events.listening()


def _fastest(loop: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        loop()
        best = min(best, (time.perf_counter_ns() - start) / CALLS)
    return best


def measure() -> dict[str, float]:
    """Nanoseconds per operation."""
    gc.disable()
    floor = _fastest(_empty)
    found = {
        "check_idle": _fastest(_check) - floor,
        "pair_idle": _fastest(_pair) - floor,
        "span_idle": _fastest(_span) - floor,
    }
    stop = events.subscribe(lambda phase, name, attrs: None)
    found["pair_one_listener"] = _fastest(_pair) - floor
    found["span_one_listener"] = _fastest(_span) - floor
    stop()
    gc.enable()
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    found = measure()
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    if as_json:
        print(json.dumps({"nanoseconds": found, **machine}))
        return
    print(f"Python {machine['python']} on {machine['machine']}, ns per operation")
    for name, value in found.items():
        print(f"{name:20} {value:8.1f}")


if __name__ == "__main__":
    main()
