"""Checkpoints of SGD, and those from before the first applied update, are continued to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mt_megatron.checkpoint import load
from mt_megatron.checkpoint.load import complete
from mt_megatron.errors import CheckpointError
from tests.checkpoint.optimizer_state_cases import CASES
from tests.launch import run_ranks


class Part:
    """As much of a Megatron optimizer as counts here."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.init_state_fn: Any = None


def test_groups_without_parameters_count_as_the_others_do() -> None:
    """FusedAdam counts in its groups and leaves out empty ones, for which another stage may have some."""
    groups: list[dict[str, Any]] = [{"params": [], "step": 2}, {"params": [1], "step": 7}, {"params": []}]
    load.count_alike(groups)
    assert [group["step"] for group in groups] == [7, 7, 7]
    groups = [{"params": []}, {"params": [1]}]
    load.count_alike(groups)
    assert groups == [{"params": []}, {"params": [1]}]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("optimizer_state"))
    results = run_ranks(2, "tests.checkpoint.optimizer_state_cases:all_cases", folder, timeout=400)
    return dict(results[0])


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_continued_to_the_bit(found: dict[str, Any], name: str) -> None:
    whole, first, second = (found[name][part] for part in ("whole", "first", "second"))
    assert "error" not in second, second
    assert first["iteration"] == 2 and len(second["steps"]) == 3
    assert {**first["steps"], **second["steps"]} == whole["steps"]
    if "fp16" in name:
        assert first["skipped_iterations"] == 2, "an update was applied: this shows nothing"


@pytest.mark.parametrize("others", [None, "rank 1 has [1] and the checkpoint [2]"])
@pytest.mark.parametrize("own", [1, 2])
def test_another_number_of_groups_is_told_to_all_ranks(
    own: int, others: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import dist_checkpointing

    def gather(everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine, others]

    ranks = {"get_rank": lambda: 0, "get_world_size": lambda: 2, "all_gather_object": gather}
    for name, function in ranks.items():
        monkeypatch.setattr(load.dist, name, function)
    saved = {"optimizer": {"optimizer": {"param_groups": [{}, {}]}}}
    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", lambda folder: saved)
    wanted = {"optimizer": {"optimizer": {"param_groups": [{}] * own, "state": {}}}}
    if own == 2 and others is None:
        load._require_same_groups(Path("iter_0000002"), wanted)
        return
    with pytest.raises(CheckpointError, match=r"has \[1\] and the checkpoint \[2\] .* --load"):
        load._require_same_groups(Path("iter_0000002"), wanted)


def test_without_parameters_the_groups_count() -> None:
    """As for experts on a stage that has none: what it saves says zero updates, as the others' does."""
    inner = torch.optim.AdamW([{"params": []}], lr=0.1)
    complete(Part(inner))
    assert inner.param_groups[0]["step"] == 0.0
    inner.param_groups[0]["step"] = 3.0
    complete(Part(inner))
    assert inner.param_groups[0]["step"] == 3.0


@pytest.mark.parametrize("kind", ["adam", "adam_fused", "sgd", "sgd_nesterov", "sgd_plain"])
def test_the_next_update_is_the_same_to_the_bit(kind: str) -> None:
    def made(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        if kind.startswith("adam"):
            return torch.optim.AdamW([parameter], lr=0.1, fused=kind == "adam_fused")
        momentum = 0.0 if kind == "sgd_plain" else 0.9
        return torch.optim.SGD([parameter], lr=0.1, momentum=momentum, nesterov=kind == "sgd_nesterov")

    values = torch.randn(33, generator=torch.Generator().manual_seed(1))
    parameters = [torch.nn.Parameter(values.clone()) for _ in range(2)]
    plain, completed = (made(each) for each in parameters)
    complete(Part(completed))
    assert bool(completed.state) == (kind != "sgd_plain")
    for step in range(3):
        for parameter, optimizer in zip(parameters, (plain, completed), strict=True):
            parameter.grad = torch.sin(values * (step + 1))
            optimizer.step()
        assert torch.equal(*parameters)
    before = {key: value.clone() for key, value in completed.state[parameters[1]].items()}
    complete(Part(completed))
    assert all(torch.equal(before[key], value) for key, value in completed.state[parameters[1]].items())
