"""The optimizer's parameter groups have one order, whichever parameter a pipeline stage begins with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import mt_megatron
from mt_megatron.patches.optimizer import param_groups


class Stage(torch.nn.Module):
    """Parameters named and shaped as in a model, registered in the given order."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            parameter = torch.nn.Parameter(torch.zeros(2) if "norm" in name else torch.zeros(2, 2))
            if "expert" in name:
                parameter.allreduce = False  # type: ignore[attr-defined]
            if "embedding" in name:
                parameter.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)


def groups(names: tuple[str, ...], decoupled: float | None = None) -> list[tuple[Any, ...]]:
    from megatron.core.optimizer import _get_param_groups

    found = _get_param_groups([Stage(names)], None, None, 1.0, 1e-3, 1e-4, decoupled, decoupled)
    keys = ("wd_mult", "is_expert_parallel", "is_decoupled_lr")
    return [tuple(group[key] for key in keys) for group in found]


NAMES = ("embedding", "norm", "expert_norm", "expert", "matrix")


def test_the_order_does_not_depend_on_the_parameters() -> None:
    with mt_megatron.patched("cpu"):
        found = {tuple(groups(names, 1e-2)) for names in itertools.permutations(NAMES)}
        dense = ((1.0, False, True), (1.0, False, False), (0.0, False, False))
        assert found == {(*dense, (1.0, True, False), (0.0, True, False))}
        first, later = groups(("embedding", "norm", "matrix")), groups(("norm", "matrix"))
        assert first == later == [(1.0, False, False), (0.0, False, False)]


def test_a_stage_has_an_empty_group_where_only_others_have_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three stages: the embedding alone, layers, and layers with the output."""
    stages = (("embedding",), ("norm", "matrix"), ("norm", "matrix", "embedding"))

    def made(names: tuple[str, ...], decoupled: float | None) -> list[dict[str, Any]]:
        from megatron.core.optimizer import _get_param_groups

        found: list[dict[str, Any]] = _get_param_groups(
            [Stage(names)], None, None, 1.0, 1e-3, 1e-4, decoupled, decoupled
        )
        return found

    with mt_megatron.patched("cpu"):
        for decoupled, expected in ((None, 2), (1e-2, 3)):
            alone = [made(names, decoupled) for names in stages]
            said = [{**group, "params": None} for groups in alone for group in groups]
            monkeypatch.setattr(param_groups, "_pipelines", lambda: ["pipeline"])
            monkeypatch.setattr(param_groups, "_of_all_stages", lambda groups, pipeline, said=said: said)
            assert len({len(made(names, decoupled)) for names in stages}) > 1, (
                "files of scripts have no others"
            )
            with param_groups.same_on_all_stages():
                together = [made(names, decoupled) for names in stages]
            monkeypatch.undo()
            assert len({len(groups) for groups in alone}) > 1
            settings = [[{**group, "params": None} for group in groups] for groups in together]
            assert settings == [settings[0]] * 3 and len(settings[0]) == expected
            for before, after in zip(alone, together, strict=True):
                count = sum(len(group["params"]) for group in before)
                assert sum(len(group["params"]) for group in after) == count


def test_upstream_puts_a_later_stage_the_other_way_round() -> None:
    """What the patch is for; should this fail, it is not needed any more."""
    with mt_megatron.patched("cpu", features=["device"]):
        assert groups(("embedding", "norm")) == list(reversed(groups(("norm", "matrix"))))


@pytest.mark.parametrize("order", [("norm", "matrix"), ("matrix", "norm")])
def test_no_parameter_is_lost(order: tuple[str, ...]) -> None:
    from megatron.core.optimizer import _get_param_groups

    with mt_megatron.patched("cpu"):
        stage = Stage(order)
        found = _get_param_groups([stage], None, None, 1.0, 1e-3, 1e-4, None, None)
    held = [id(parameter) for group in found for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in stage.parameters())


def test_a_stage_without_experts_has_a_group_for_them_where_experts_are_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mt_megatron.patched("cpu"):
        from megatron.core import parallel_state

        monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
        dense, mixed = groups(("norm", "matrix")), groups(("norm", "matrix", "expert"))
        assert dense == mixed == [(1.0, False, False), (0.0, False, False), (1.0, True, False)]
        monkeypatch.undo()
        assert groups(("norm", "matrix")) == dense[:2]
