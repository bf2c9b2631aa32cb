"""Runs that load their weights need not draw them first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.scope.watch.layouts import EXPERTS, SP, TP

NORMS = "tests.training.initialization_cases:norms"
UNDRAWN = "--no-initialization"


def test_norms_have_all_parts_of_weights_that_were_not_drawn(tmp_path: Path) -> None:
    """Upstream marks a weight as a part where it draws it alone; unmarked parts are left out of the norm."""
    kinds = {"dense": "", "experts": EXPERTS}
    (one,) = run_ranks(1, NORMS, str(tmp_path), kinds)
    layouts = {
        f"{name} {undrawn}": f"{flags} {TP} {SP} {undrawn}"
        for name, flags in kinds.items()
        for undrawn in ("", UNDRAWN)
    }
    for found in run_ranks(2, NORMS, str(tmp_path), layouts, timeout=240):
        for name in kinds:
            for undrawn in ("", UNDRAWN):
                assert found[f"{name} {undrawn}"] == pytest.approx(one[name], rel=1e-4)
