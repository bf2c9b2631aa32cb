"""A small trace made by hand for tests of what reads traces: DP 2 x PP 2, two micro-batches, known times.

Every rank runs a list of actions; a transfer or collective begins to move when its last side has arrived, so
that waits come about as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.scan.format.records import COUNTER, KIND, OPEN, PING, SPAN
from mt_megatron.scan.format.run_files import run_files, segment_path, write_run
from mt_megatron.scan.format.segments import Group, SegmentWriter

MS = 1_000_000
STRINGS = (
    "",
    "send",
    "recv",
    "all_reduce",
    "forward",
    "backward",
    "AdamW",
    "beat_delay_ns",
    "process_cpu_ns",
)
NAME = {text: number for number, text in enumerate(STRINGS)}
DP, PP = 1, 2
"""Numbers of the groups in every rank's table."""

FORWARD, BACKWARD, OPTIMIZER, TRANSFER, REDUCE, DATA = 10 * MS, 20 * MS, 2 * MS, MS, 3 * MS, MS // 2


@dataclass
class HandmadeRun:
    """What is to be written, and what the writer noted of it."""

    steps: int = 6
    slow_rank: int | None = None
    factor: float = 2.0
    slow_from: int = 1
    hangs: int | None = None
    """This rank enters the last collective of one more step never; the others wait for it."""

    offsets: Mapping[int, int] = field(default_factory=dict)
    """Per rank: its clock minus the reference's, ns."""

    begins: dict[tuple[int, int], int] = field(default_factory=dict)
    """(rank, step) -> begin of the step on the reference clock."""


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank, self.dp, self.pp = rank, rank % 2, rank // 2
        self.now = 1_000 * MS + rank * 7
        self.rows: list[dict[str, Any]] = []
        self.actions: list[tuple[Any, ...]] = []

    def span(self, kind: str, begin: int, end: int, **more: Any) -> None:
        row = {"kind": KIND[kind], "begin": begin, "end": end, "bytes": -1, "seq": -1, "peer": -1}
        self.rows.append({**row, "microbatch": -1, "chunk": -1, **more})


def write_handmade(run: Path, made: HandmadeRun | None = None, *, simulated: bool = False) -> HandmadeRun:
    """Write the run into ``run/scan``."""
    made = made or HandmadeRun()
    ranks = [_Rank(rank) for rank in range(4)]
    counts: dict[tuple[Any, ...], int] = {}
    for step in range(1, made.steps + 1):
        _step(ranks, made, step, counts)
    if made.hangs is not None:
        _hang(ranks, made, counts)
    files = run_files(run)
    places = [{"rank": r.rank, "host": f"node-{r.dp}", "node": r.dp, "dp": r.dp, "pp": r.pp} for r in ranks]
    layout = {"tp": 1, "pp": 2, "dp": 2}
    write_run(files, {"world_size": 4, "layout": layout, "ranks": places, "simulated": simulated})
    for rank in ranks:
        _write(rank, run, made)
    return made


def _write(rank: _Rank, run: Path, made: HandmadeRun) -> None:
    folder = run_files(run).rank_folder(rank.rank)
    folder.mkdir(mode=0o700)
    offset = made.offsets.get(rank.rank, 0)
    spans = np.zeros(len(rank.rows), dtype=SPAN)
    for index, row in enumerate(rank.rows):
        for name, value in row.items():
            spans[index][name] = value
    spans["begin"] += offset
    spans["end"][spans["end"] != OPEN] += offset
    counters = np.zeros(20, dtype=COUNTER)
    counters["time"] = np.linspace(1_000 * MS, rank.now, 20).astype(np.int64) + offset
    counters["name"][::2], counters["name"][1::2] = NAME["beat_delay_ns"], NAME["process_cpu_ns"]
    counters["value"][4] = 2.0 * MS
    counters["value"][1::2] = (counters["time"][1::2] - counters["time"][0]) * 0.9
    meta = {
        "rank": rank.rank,
        "host": f"node-{rank.dp}",
        "pid": 100 + rank.rank,
        "boot_id": f"boot-{rank.rank if rank.rank in made.offsets else 'all'}",
        "clock": "monotonic",
        "session": 0,
    }
    writer = SegmentWriter(segment_path(folder, 0), rank.rank, meta)
    writer.strings(list(STRINGS))
    pair, line = (2 * rank.pp, 2 * rank.pp + 1), (rank.dp, rank.dp + 2)
    writer.groups({DP: Group(name="dp", ranks=pair), PP: Group(name="pp", ranks=line)})
    half = len(spans) // 2
    writer.spans(spans[:half])
    writer.counters(counters)
    writer.spans(spans[half:])
    if rank.rank == made.hangs:
        stacks = {"MainThread": ["train.py:3 in main", "train.py:7 in stuck"]}
        writer.note({"what": "stack", "time": rank.now, "silent_seconds": 19.0, "stacks": stacks})
    if offset:
        writer.pings(_pings(rank.now, offset))
    writer.close()


def _pings(last: int, offset: int) -> np.ndarray:
    """Exchanges with rank 0: 10 us each way."""
    pings = np.zeros(30, dtype=PING)
    sent = np.linspace(1_000 * MS, last, 30).astype(np.int64)
    pings["sent"], pings["returned"] = sent + offset, sent + 20_000 + offset
    pings["received"] = pings["answered"] = sent + 10_000
    return pings


def _step(ranks: list[_Rank], made: HandmadeRun, step: int, counts: dict[tuple[Any, ...], int]) -> None:
    for rank in ranks:
        slow = rank.rank == made.slow_rank and step >= made.slow_from
        rank.actions = _program(rank, made.factor if slow else 1.0)
        made.begins[rank.rank, step] = rank.now
    begun = {rank.rank: rank.now for rank in ranks}
    while any(rank.actions for rank in ranks):
        if not any(_advance(rank, ranks, step, counts) for rank in ranks):
            raise AssertionError("the hand-made schedule does not go on")
    for rank in ranks:
        rank.span("step", begun[rank.rank], rank.now, iteration=step)


def _hang(ranks: list[_Rank], made: HandmadeRun, counts: dict[tuple[Any, ...], int]) -> None:
    """Rank ``made.hangs`` stands still before its collective; its stage's other rank waits in it for 20 s."""
    step = made.steps + 1
    for rank in ranks:
        begin = rank.now
        rank.span("step", begin, OPEN, iteration=step)
        rank.span("forward", begin, begin + FORWARD, iteration=step)
        rank.now = begin + FORWARD
        if rank.rank != made.hangs:
            more = {"group": DP, "name": NAME["all_reduce"], "seq": counts["dp", rank.pp], "iteration": step}
            rank.span("collective", rank.now, OPEN, **more)
        rank.now += 20_000 * MS


def _program(rank: _Rank, factor: float) -> list[tuple[Any, ...]]:
    other = rank.dp + 2 * (1 - rank.pp)
    actions: list[tuple[Any, ...]] = [("work", "data", DATA, -1)]
    for microbatch in range(2):
        if rank.pp == 1:
            actions.append(("p2p", other, rank.rank, microbatch))
        actions.append(("work", "forward", int(FORWARD * factor), microbatch))
        if rank.pp == 0:
            actions.append(("p2p", rank.rank, other, microbatch))
    for microbatch in range(2):
        if rank.pp == 0:
            actions.append(("p2p", other, rank.rank, microbatch))
        actions.append(("work", "backward", int(BACKWARD * factor), microbatch))
        if rank.pp == 1:
            actions.append(("p2p", rank.rank, other, microbatch))
    actions.append(("reduce",))
    actions.append(("work", "optimizer", OPTIMIZER, -1))
    return actions


def _advance(rank: _Rank, ranks: list[_Rank], step: int, counts: dict[tuple[Any, ...], int]) -> bool:
    if not rank.actions:
        return False
    action = rank.actions[0]
    if action[0] == "work":
        _, kind, length, microbatch = action
        name = {"forward": "forward", "backward": "backward", "optimizer": "AdamW"}.get(kind, "")
        more = {"iteration": step, "microbatch": microbatch, "name": NAME[name]}
        rank.span(kind, rank.now, rank.now + length, **more)
        rank.now += length
        rank.actions.pop(0)
        return True
    if action[0] == "p2p":
        _, source, target, microbatch = action
        sides = [ranks[source], ranks[target]]
        key: tuple[Any, ...] = ("p2p", source, target)
        return _meet(sides, action, TRANSFER, step, counts, key, _transfer(source, target, microbatch))
    sides = [each for each in ranks if each.pp == rank.pp]
    more = {"group": DP, "name": NAME["all_reduce"], "bytes": 4096}
    return _meet(sides, action, REDUCE, step, counts, ("dp", rank.pp), lambda _: ("collective", more))


def _transfer(source: int, target: int, microbatch: int) -> Callable[[_Rank], tuple[str, dict[str, Any]]]:
    def span(side: _Rank) -> tuple[str, dict[str, Any]]:
        sends = side.rank == source
        more = {"peer": target if sends else source, "name": NAME["send" if sends else "recv"], "group": PP}
        return "p2p", {**more, "bytes": 1024, "microbatch": microbatch}

    return span


def _meet(
    sides: list[_Rank],
    action: tuple[Any, ...],
    length: int,
    step: int,
    counts: dict[tuple[Any, ...], int],
    key: tuple[Any, ...],
    span: Callable[[_Rank], tuple[str, dict[str, Any]]],
) -> bool:
    if not all(side.actions and side.actions[0] == action for side in sides):
        return False
    end = max(side.now for side in sides) + length
    number = counts.get(key, 0)
    counts[key] = number + 1
    for side in sides:
        kind, more = span(side)
        side.span(kind, side.now, end, seq=number, iteration=step, **more)
        side.now = end
        side.actions.pop(0)
    return True
