"""Error of several processes' clocks put onto one: known offsets and drifts, real sockets, real load.

    python benchmarks/scan/scan_clock.py [--seconds 60] [--ranks 4] [--load 2] [--json] [--record FOLDER]

Every process has a clock of its own: the machine's, plus up to 1 s, faster or slower by up to 50 ppm. They
exchange pings as a run does, on its schedule, and send each other messages. Afterwards the clocks are
fitted and compared with what they were made of.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.scan.clock.fit import Clocks, fit_clocks
from mt_megatron.scan.clock.pings import ClockPings
from mt_megatron.scan.format.records import KIND, PING, SPAN

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # For the modules that all benchmarks share.

from recording import machine, record, table  # noqa: E402

MESSAGE_PAUSE = 0.01
START_SECONDS = 100.0


@dataclass(frozen=True, kw_only=True)
class FalseClock:
    """A clock that is ahead by ``offset`` ns at ``start`` and runs faster by ``drift``."""

    start: int
    offset: int
    drift: float

    def __call__(self) -> int:
        return int(self.at(np.array([time.perf_counter_ns()], dtype=np.int64))[0])

    def at(self, true: np.ndarray) -> np.ndarray:
        """What it shows at the machine's times ``true``, int64 ns."""
        return true + self.offset + np.rint((true - self.start) * self.drift).astype(np.int64)


class FileBoard:
    """Messages as files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, key: str, text: str) -> None:
        """Leave ``text``."""
        path = self._folder / key.replace("/", "-")
        hidden = path.with_suffix(f".{os.getpid()}")
        hidden.write_text(text)
        hidden.rename(path)

    def read(self, key: str) -> str | None:
        """What was left, or None so far."""
        path = self._folder / key.replace("/", "-")
        return path.read_text() if path.exists() else None


@dataclass(frozen=True, kw_only=True)
class RankData:
    """What the clocks need of one rank."""

    meta: dict[str, Any]
    pings: np.ndarray
    spans: np.ndarray
    strings: Sequence[str] = ("", "send", "recv")
    groups: dict[int, Any]


def false_clocks(ranks: int, seed: int) -> list[FalseClock]:
    """The first is ahead by nothing; the others by up to a second either way, with up to 50 ppm."""
    draw, start = np.random.default_rng(seed), time.perf_counter_ns()
    clocks = [FalseClock(start=start, offset=0, drift=0.0)]
    for rank in range(1, ranks):
        sign = 1 if rank % 2 else -1
        offset, drift = sign * 10**9, sign * 50e-6
        if rank > 2:
            offset, drift = int(draw.uniform(-1e9, 1e9)), float(draw.uniform(-50e-6, 50e-6))
        clocks.append(FalseClock(start=start, offset=offset, drift=drift))
    return clocks


def measure(*, seconds: float, ranks: int, load: int, seed: int = 0) -> tuple[dict[str, float], Clocks]:
    """Figures (times in microseconds) and the fit."""
    clocks = false_clocks(ranks, seed)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="mt_megatron_clock_") as scratch:
        # Rank r writes to r + 1.
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        together = context.Barrier(ranks)
        processes = [
            context.Process(
                target=_rank,
                args=(
                    *(rank, ranks, clocks[rank], Path(scratch)),
                    *(pipes[rank - 1][0], pipes[rank][1], together, seconds),
                ),
            )
            for rank in range(ranks)
        ]
        busy = [context.Process(target=_busy, args=(seconds,), daemon=True) for _ in range(load)]
        began = time.perf_counter_ns()
        for process in (*busy, *processes):
            process.start()
        for process in processes:
            process.join()
        ended = time.perf_counter_ns()
        for process in busy:
            process.terminate()
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank ended with an error; see above")
        data = {rank: _read(rank, Path(scratch)) for rank in range(ranks)}
    return _figures(data, clocks, began, ended)


def _figures(
    data: dict[int, RankData], clocks: list[FalseClock], began: int, ended: int
) -> tuple[dict[str, float], Clocks]:
    found = fit_clocks(data)
    without = fit_clocks({rank: _without_spans(each) for rank, each in data.items()})
    true = np.linspace(began, ended, 20_001).astype(np.int64)
    expected = clocks[0].at(true)
    errors, alone = (
        np.concatenate(
            [
                np.abs(fit.to_reference(rank, clocks[rank].at(true)) - expected) / 1e3
                for rank in range(1, len(clocks))
            ]
        )
        for fit in (found, without)
    )
    early, messages = _early(data, found)
    early_without, _ = _early(data, without)
    round_trips = np.concatenate([_round_trips(each.pings) for each in data.values()]) / 1e3
    return {
        "seconds": (ended - began) / 1e9,
        "pings": float(sum(len(each.pings) for each in data.values())),
        "round_trip_min": float(round_trips.min()),
        "round_trip_median": float(np.median(round_trips)),
        "error_median": float(np.median(errors)),
        "error_p99": float(np.quantile(errors, 0.99)),
        "error_max": float(errors.max()),
        "error_p99_pings_alone": float(np.quantile(alone, 0.99)),
        "messages": float(messages),
        "early_messages": float(early),
        "early_messages_pings_alone": float(early_without),
        "early_messages_uncorrected": float(_early(data, Clocks(reference=0))[0]),
    }, found


def _round_trips(pings: np.ndarray) -> np.ndarray:
    return (pings["returned"] - pings["sent"]) - (pings["answered"] - pings["received"])


def _early(data: dict[int, RankData], clocks: Clocks) -> tuple[int, int]:
    """Messages that were received before they were sent, and messages."""
    early = total = 0
    for rank, each in data.items():
        target = (rank + 1) % len(data)
        sent = each.spans[each.spans["name"] == 1]
        received = data[target].spans[data[target].spans["name"] == 2]
        _, one, two = np.intersect1d(sent["seq"], received["seq"], return_indices=True)
        before = clocks.to_reference(rank, sent["begin"][one])
        after = clocks.to_reference(target, received["end"][two])
        early, total = early + int((after < before).sum()), total + len(one)
    return early, total


def _without_spans(each: RankData) -> RankData:
    return RankData(meta=each.meta, pings=each.pings, spans=each.spans[:0], groups={})


def _rank(
    rank: int,
    ranks: int,
    clock: FalseClock,
    scratch: Path,
    inbox: Connection,
    outbox: Connection,
    together: Barrier,
    seconds: float,
) -> None:
    found: list[np.ndarray] = []
    pings = ClockPings(
        FileBoard(scratch),
        found.append,
        rank=rank,
        world_size=ranks,
        master="127.0.0.1",
        machine=f"machine {rank}",
        now=clock,
    )
    pings.start()
    patience = time.monotonic() + START_SECONDS
    while pings.rounds == 0:
        if time.monotonic() > patience:
            raise TimeoutError(f"rank {rank} has exchanged no pings within {START_SECONDS:g} s")
        time.sleep(0.01)
    # As ranks of a run do, all begin and end together, however busy the machine is.
    together.wait(START_SECONDS)
    sent: list[tuple[int, int, int]] = []
    received: list[tuple[int, int, int]] = []
    reader = threading.Thread(target=_receive, args=(inbox, clock, received))
    reader.start()
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        begin = clock()
        outbox.send(number)
        sent.append((number, begin, clock()))
        number += 1
        time.sleep(MESSAGE_PAUSE)
    outbox.send(None)
    together.wait(START_SECONDS)
    pings.close(seconds=3.0)
    reader.join()
    np.savez(
        scratch / f"rank{rank}.npz",
        pings=np.concatenate([np.zeros(0, dtype=PING), *found]),
        sent=np.array(sent, dtype=np.int64).reshape(-1, 3),
        received=np.array(received, dtype=np.int64).reshape(-1, 3),
    )


def _receive(inbox: Connection, clock: FalseClock, received: list[tuple[int, int, int]]) -> None:
    begin = clock()
    while (number := inbox.recv()) is not None:
        end = clock()
        received.append((number, begin, end))
        begin = end


def _busy(seconds: float) -> None:
    until = time.monotonic() + seconds
    square = np.ones((128, 128))
    while time.monotonic() < until:
        square = square @ square / 128


def _read(rank: int, scratch: Path) -> RankData:
    with np.load(scratch / f"rank{rank}.npz") as file:
        spans = []
        ranks = len(list(scratch.glob("rank*.npz")))
        for name, peer, rows in (
            (1, (rank + 1) % ranks, file["sent"]),
            (2, (rank - 1) % ranks, file["received"]),
        ):
            span = np.zeros(len(rows), dtype=SPAN)
            span["kind"], span["name"], span["peer"] = KIND["p2p"], name, peer
            span["seq"], span["begin"], span["end"] = rows[:, 0], rows[:, 1], rows[:, 2]
            spans.append(span)
        meta = {"boot_id": f"machine {rank}", "clock": "false", "device_type": "cpu"}
        return RankData(meta=meta, pings=file["pings"], spans=np.concatenate(spans), groups={})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--load", type=int, default=2, help="processes that compute beside them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", type=Path, help="folder for a dated result file")
    given = parser.parse_args()
    before = machine()
    figures, clocks = measure(seconds=given.seconds, ranks=given.ranks, load=given.load, seed=given.seed)
    result = {
        "machine": before,
        "ranks": given.ranks,
        "load": given.load,
        "seed": given.seed,
        "figures": figures,
        "fit": clocks.to_dict(),
    }
    shown = table(["figure", "value"], [[name, f"{value:,.2f}"] for name, value in figures.items()])
    if given.record is not None:
        title = "Clocks of several processes put onto one (round trips and errors in microseconds)"
        for path in record(given.record, "scan-clock", title, result, shown):
            print(path)
    print(json.dumps(result, indent=1) if given.json else shown)
    for note in clocks.notes:
        print(note, file=sys.stderr)


if __name__ == "__main__":
    main()
