"""A look over a trace before its export: where it begins, its steps, which transfers have both sides."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.trace import Trace
from mt_megatron.scan.format.records import ASYNC, KIND, WAIT

from .rank_stream import Piece, Selection, pieces

Edge = tuple[int, int]
"""Sender and receiver."""

Runs = NDArray[np.int64]
"""[n, 2]: first and last of each run of numbers without a gap."""


@dataclass
class Survey:
    """What one pass over the ranks wanted found. Small: transfers are kept as runs of numbers."""

    origin: int = 0
    """Begin of the first span, ns of the reference clock."""

    spans: int = 0
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step -> first rank's begin and last rank's end."""

    sent: dict[Edge, Runs] = field(default_factory=dict)
    received: dict[Edge, Runs] = field(default_factory=dict)

    def joined(self, edge: Edge, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For transfers of ``edge``: whether both sides recorded them."""
        return _within(self.sent.get(edge), numbers) & _within(self.received.get(edge), numbers)


def survey(trace: Trace, selection: Selection) -> Survey:
    """Read the ranks wanted once, one after the other."""
    found = Survey()
    origin: int | None = None
    for rank in trace.ranks:
        if not selection.has_rank(rank):
            continue
        sides: dict[tuple[bool, int], list[NDArray[np.int64]]] = {}
        for piece in pieces(trace, rank, selection):
            spans = piece.spans
            if not len(spans):
                continue
            found.spans += len(spans)
            first = int(spans["begin"].min())
            origin = first if origin is None else min(origin, first)
            _steps(found, piece)
            for side, numbers in transfers(piece).items():
                sides.setdefault(side, []).append(spans["seq"][numbers].astype(np.int64))
        for (sends, peer), parts in sides.items():
            edge, table = ((rank, peer), found.sent) if sends else ((peer, rank), found.received)
            table[edge] = _runs(np.concatenate(parts))
    found.origin = origin or 0
    return found


def transfers(piece: Piece) -> dict[tuple[bool, int], NDArray[np.intp]]:
    """``(this rank sends, other rank)`` -> indices of the numbered transfers that this rank began.

    The wait for one that was started before counts as its end only, so a receive is taken where it ends.
    """
    spans = piece.spans
    named = {text: number for number, text in enumerate(piece.strings) if text in ("send", "recv")}
    found: dict[tuple[bool, int], NDArray[np.intp]] = {}
    p2p = (spans["kind"] == KIND["p2p"]) & (spans["seq"] >= 0) & (spans["peer"] >= 0)
    for text, number in named.items():
        own = p2p & (spans["name"] == number)
        for peer in np.unique(spans["peer"][own]).tolist():
            # Of an asynchronous transfer the begin is the send's and the wait the receive's.
            side = own & (spans["peer"] == peer)
            found[text == "send", peer] = np.flatnonzero(side & _end_of_arrow(spans, text == "send"))
    return found


def _end_of_arrow(spans: NDArray[np.void], sends: bool) -> NDArray[np.bool_]:
    started = (spans["flags"] & ASYNC) != 0
    waited = (spans["flags"] & WAIT) != 0
    chosen: NDArray[np.bool_] = ~waited if sends else ~started
    return chosen


def _steps(found: Survey, piece: Piece) -> None:
    steps = piece.spans[(piece.spans["kind"] == KIND["step"]) & ~piece.unfinished]
    for number, begin, end in zip(
        steps["iteration"].tolist(), steps["begin"].tolist(), steps["end"].tolist(), strict=True
    ):
        known = found.steps.get(number, (begin, end))
        found.steps[number] = (min(known[0], begin), max(known[1], end))


def _runs(numbers: NDArray[np.int64]) -> Runs:
    if not len(numbers):
        return np.empty((0, 2), dtype=np.int64)
    ordered = np.unique(numbers)
    breaks = np.flatnonzero(np.diff(ordered) > 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))]
    lasts = ordered[np.concatenate((breaks, [len(ordered) - 1]))]
    return np.column_stack((firsts, lasts))


def _within(runs: Runs | None, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    if runs is None or not len(runs):
        return np.zeros(len(numbers), dtype=bool)
    at = np.searchsorted(runs[:, 0], numbers, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (numbers <= runs[np.maximum(at, 0), 1])
    return inside
