"""Model, gradient buffers and optimizer are built, and forward runs, with everything on the rank's GPU.

The tensors are torch's fake ones, the collectives do nothing, and ``torch.cuda`` is a stand-in: this
shows devices, shapes and dtypes, not numbers, and nothing of backward (see tests/device for that).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_cuda import needs_a_cpu_build
from tests.fake_cuda.layouts import covering
from tests.fake_cuda.outcomes import PLAIN
from tests.fake_cuda.outcomes import outcomes as launched
from tests.launch import run_ranks

pytestmark = needs_a_cpu_build


SMALL = {**PLAIN, "tp": 2, "sp": True, "pp": 2, "dtype": "bf16", "optimizer": "distributed_overlap"}
"""Layout that runs in the first lane."""


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return launched()


@pytest.fixture(scope="module")
def found(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [outcome for outcome in outcomes if outcome["plant"] is None]


def describe(outcome: dict[str, Any]) -> str:
    return f"rank {outcome['rank']} ({outcome['stage']} stage) of {outcome['row']}"


def test_a_pipeline_of_tensor_parallel_stages_runs_forward() -> None:
    [stages] = run_ranks(1, "tests.fake_cuda.forward:run_share", [[SMALL, None]], timeout=300)
    for outcome in stages:
        assert not outcome["error"], f"{describe(outcome)}\n{outcome['error']}"
        assert outcome["devices"] == [outcome["device"]] and outcome["forwards"] == 2, describe(outcome)
    assert [outcome["stage"] for outcome in stages] == ["first", "last"]


@pytest.mark.daily
def test_every_layout_runs_forward(found: list[dict[str, Any]]) -> None:
    failed = [f"{describe(outcome)}\n{outcome['error']}" for outcome in found if outcome["error"]]
    assert not failed, f"{len(failed)} of {len(found)} ranks failed, the first:\n{failed[0]}"
    assert len(found) > len(covering())


@pytest.mark.daily
def test_everything_is_on_the_device_of_the_rank(found: list[dict[str, Any]]) -> None:
    for outcome in found:
        assert outcome.get("devices") == [outcome["device"]], describe(outcome)
        assert outcome["held"] > 20 and outcome["hooks"] > 0, describe(outcome)
    assert len({outcome["device"] for outcome in found}) >= 4, "some index other than 0 must occur"


@pytest.mark.daily
def test_every_micro_batch_passed_every_chunk(found: list[dict[str, Any]]) -> None:
    for outcome in found:
        row = outcome["row"]
        assert outcome.get("forwards") == row["pp"] * row["vpp"], describe(outcome)
        last = outcome["stage"] == "last" or row["pp"] == 1
        assert outcome["reports"] == (row["pp"] if last else 0), describe(outcome)


@pytest.mark.daily
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_planted_tensor_elsewhere_is_noticed(outcomes: list[dict[str, Any]], device: str) -> None:
    """Negative control: on the host, and on another GPU than the rank's. Without it the same rows pass."""
    planted = [outcome for outcome in outcomes if outcome["plant"] == device]
    assert len(planted) == 3
    for outcome in planted:
        assert "FakeTensorDeviceMismatchError" in outcome["error"], describe(outcome)
        assert device in outcome["error"] and outcome["device"] in outcome["error"]
