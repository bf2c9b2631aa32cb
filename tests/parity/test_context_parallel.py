"""Dropout on context-parallel ranks: the same masks in recomputation, by ring, and on another device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulators import environment
from tests.launch import run_ranks
from tests.parity import case
from tests.parity.case import CP, RECOMPUTE, STEPS, Layout
from tests.parity.run import run_layouts

DROPOUT = f"{CP} --attention-dropout 0.2 --hidden-dropout 0.1"
LAYOUTS = (
    Layout(name="cp2_dropout", world=2, flags=DROPOUT),
    Layout(name="cp2_dropout_recompute", world=2, flags=f"{DROPOUT} {RECOMPUTE}"),
    Layout(
        name="cp2_dropout_ring_selective",
        world=2,
        flags=f"{DROPOUT} --cp-comm-type p2p --recompute-granularity selective",
    ),
)


def with_dropout(folder: str) -> list[list[float]]:
    """Losses of ``LAYOUTS``. They equal no run of one process, so no other test may compare them."""
    case.LAYOUTS = (*case.LAYOUTS, *LAYOUTS)
    results = run_layouts([each.name for each in LAYOUTS], folder, 1234, False)
    return [results[each.name]["losses"] for each in LAYOUTS]


@pytest.mark.soak
def test_dropout_draws_the_same_whatever_is_recomputed_and_wherever_it_runs(tmp_path: Path) -> None:
    (one,) = run_ranks(1, "tests.parity.run:run_layouts", ["one"], str(tmp_path), 1234, False, timeout=300)
    target = "tests.parity.test_context_parallel:with_dropout"
    cpu = run_ranks(2, target, str(tmp_path), timeout=400)[0]
    assert cpu[0] == cpu[1] == cpu[2] and len(cpu[0]) == STEPS
    assert cpu[0][0] - cpu[0][-1] >= 1.0
    assert abs(cpu[0][0] - one["one"]["losses"][0]) > 1e-3, "nothing was dropped"
    musa = run_ranks(2, target, str(tmp_path), timeout=400, env=environment())[0]
    for losses in musa:
        assert losses == pytest.approx(cpu[0], rel=1e-6)
