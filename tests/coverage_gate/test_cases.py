"""Every named test of the gate, reported one by one; they share two launches (see ``runs``)."""

from __future__ import annotations

import pytest

from tests.coverage_gate.case import all_cases
from tests.coverage_gate.runs import Run

ALWAYS = (
    "embeddings.default_causal_mask",
    "moe.alltoall_dispatcher_alone",
    "optimizer.fp32_step",
    "optimizer.norms_and_zeros_of_gradients",
)
"""Cases of one and of two ranks that every run has; the others, and the gate, belong to the second lane."""


def _marked() -> list[object]:
    return [
        pytest.param(found.name, marks=() if found.name in ALWAYS else pytest.mark.daily)
        for found in all_cases()
    ]


@pytest.mark.parametrize("name", _marked())
def test_case(name: str, gate_run: Run) -> None:
    """The case passed on every rank."""
    if name in gate_run.errors:
        pytest.fail(gate_run.errors[name], pytrace=False)
    assert name in gate_run.seconds, "the case was never run"
