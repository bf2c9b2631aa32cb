"""A real mixture whose routers become uneven: the rank with more tokens is named, for that alone."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np
import pytest

from mt_megatron.scan.analysis.step_features import rank_steps
from mt_megatron.scan.diagnose.run import diagnose
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.format.segments import read_rank
from tests.launch import run_ranks

from .uneven_ranks import RANK

BIAS = 0.15


def trained(folder: Path, *, steps: int, uneven_from: int, width: int, bias: float) -> list[list[int]]:
    """Rows that each rank's experts got, by step."""
    target = "tests.scan.diagnose.uneven_ranks:trained"
    ranks = run_ranks(2, target, str(folder), steps, uneven_from, width, bias, timeout=500)
    rows = [each["rows"] for each in ranks]
    # One token goes to one expert: every row of the two layers is somebody's.
    assert {sum(each) for each in zip(*rows, strict=True)} == {2 * 2 * 4 * 64}
    return rows


def test_what_the_routers_did_is_in_the_trace(tmp_path: Path) -> None:
    """The evidence, without the time that it cost, which a busy machine hides."""
    rows = trained(tmp_path, steps=8, uneven_from=5, width=32, bias=BIAS)
    assert all(0.7 < own / other < 1.4 for own, other in zip(rows[RANK][:4], rows[1 - RANK][:4], strict=True))
    assert all(own > 1.5 * other for own, other in zip(rows[RANK][4:], rows[1 - RANK][4:], strict=True))
    for rank in (0, 1):
        steps = rank_steps(rank, read_rank(tmp_path / "scan" / f"rank-{rank:05d}"))
        recorded = dict(zip(steps.iteration.tolist(), steps.columns["expert_work"].tolist(), strict=True))
        known = {step: count for step, count in recorded.items() if np.isfinite(count)}
        assert len(known) >= 7 and all(count == rows[rank][step - 1] for step, count in known.items())


def check(findings: list[Finding], rows: list[list[int]], uneven_from: int) -> None:
    own, other = (median(rows[rank][uneven_from:]) for rank in (RANK, 1 - RANK))
    (uneven,) = [each for each in findings if each.cause == "uneven_work"]
    assert uneven.ranks == (RANK,) and uneven.details["of"] == "expert_work"
    assert abs(uneven.first_step - uneven_from) <= 2
    assert uneven.details["more_work"] == pytest.approx(own / other - 1, rel=0.25)
    assert any("more rows for its experts, which explains most of it" in each for each in uneven.evidence)
    assert RANK not in {rank for each in findings if each.cause == "slow_compute" for rank in each.ranks}


@pytest.mark.soak
@pytest.mark.parametrize("bias", [BIAS, 0.0])
def test_the_rank_that_gets_more_tokens_has_uneven_work(tmp_path: Path, bias: float) -> None:
    """0: the control. Its time is measured: beside other load there is nothing to see."""
    rows = trained(tmp_path, steps=60, uneven_from=25, width=4096, bias=bias)
    findings = [each for each in diagnose(tmp_path).findings if each.confidence >= 0.5]
    if bias:
        check(findings, rows, 25)
    else:
        assert not [each for each in findings if each.cause == "uneven_work"]
