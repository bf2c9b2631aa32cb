"""Checkpoints of grouped experts: interchangeable with sequential ones, the distributed optimizer's too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.launch import run_ranks

RANKS = "tests.patches.model.experts_checkpoint_ranks:round_trips"


def kind(grouped: bool, tp: int, ep: int, distributed: bool = True) -> dict[str, Any]:
    return {"grouped": grouped, "tp": tp, "ep": ep, "distributed": distributed}


TRIPS = [
    # Slices of two data parallel ranks cut through experts and through the halves of a SwiGLU.
    [kind(True, 1, 2), [kind(True, 1, 2), kind(False, 1, 4), kind(True, 2, 2)]],
    [kind(False, 2, 2), [kind(True, 1, 4)]],
    [kind(True, 2, 1), [kind(False, 1, 1)]],
    [kind(True, 2, 2, False), [kind(False, 1, 2, False), kind(True, 1, 4, False)]],
]


def test_every_number_arrives_where_it_belongs(tmp_path: Path) -> None:
    ranks = run_ranks(4, RANKS, str(tmp_path), TRIPS, timeout=240)
    readers = [(saver, loader) for saver, loaders in TRIPS for loader in loaders]
    for number, (saver, loader) in enumerate(readers):
        looked_at = 0
        for rank in ranks:
            before, after, shifted = rank[number]
            looked_at += after["looked_at"]
            assert after["weights"] == after["states"] == 0, (saver, loader, after)
            # The controls: what was there before, and experts in another order, are noticed.
            assert before["weights"] > 0 and shifted["weights"] > 0, (saver, loader)
            assert before["states"] or not after["looked_at"]
            assert shifted["states"] or not after["looked_at"]
        assert looked_at > 0
