"""What a pair tells of its modules: which of them comes first, and which cannot be compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mt_megatron.cli.scope.control import _paired
from mt_megatron.scope.lab.pair import Comparison, Row
from mt_megatron.scope.lab.specification import perturbation_from
from mt_megatron.seams import taps

FIGURES: Any = SimpleNamespace(loss=1.0, grad_norm=1.0, skipped=False, reason=None)
LAYER = "decoder.layers.0"
DEPTH = "mtp.layers.0"


def _compared(outputs: dict[str, tuple[Tensor, Tensor]]) -> Comparison:
    """Outputs of both steps by path, in the order of a step; the first of a pair is the baseline's."""
    one = perturbation_from({"kind": "mask", "on": "activation", "module": LAYER})
    trainer: Any = SimpleNamespace(bare_chunks=lambda: [nn.ModuleDict({"decoder": nn.Identity()})])
    made = Comparison(trainer, one, {"modules": "*"})
    call = taps.Call(nn.Identity(), 0, 0, 0, False)
    with made.baseline():
        for path, (before, _) in outputs.items():
            made._after(path)(call, before)
    with made.perturbed():
        for path, (_, after) in outputs.items():
            made._after(path)(call, after)
    made.close()
    return made


def _told(made: Comparison, others: list[tuple[list[Row], int]] | None = None) -> dict[str, Any]:
    return made.result(FIGURES, FIGURES, made.rows(lambda own: [own, *(others or [])]))


def _own(made: Comparison) -> tuple[list[Row], int]:
    kept: list[Any] = []

    def gathered(own: Any) -> list[Any]:
        kept.append(own)
        return [own]

    made.rows(gathered)
    return kept[0]


SAME = (torch.ones(2, 1, 4), torch.ones(2, 1, 4))
OTHER = (torch.ones(2, 1, 4), torch.zeros(2, 1, 4))
PARTS = [
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp",
]
IN_ORDER = [
    "embedding",
    *(f"{LAYER}.{part}" for part in PARTS),
    LAYER,
    "decoder.layers.1.mlp",
    "decoder.layers.1",
    "decoder.final_layernorm",
    f"{DEPTH}.enorm",
    *(f"{DEPTH}.transformer_layer.{part}" for part in PARTS),
    f"{DEPTH}.transformer_layer",
    DEPTH,
]


def test_modules_are_in_the_order_of_their_outputs() -> None:
    told = _told(_compared(dict.fromkeys(IN_ORDER, SAME)))
    assert [each["path"] for each in told["modules"]] == IN_ORDER
    assert told["first_difference"] is None


@pytest.mark.parametrize(
    ("differ", "first"),
    [
        ([f"{DEPTH}.enorm", DEPTH, "decoder.layers.1"], "decoder.layers.1"),
        ([f"{LAYER}.mlp", f"{LAYER}.self_attention.linear_proj"], f"{LAYER}.self_attention.linear_proj"),
        ([LAYER, f"{LAYER}.mlp"], f"{LAYER}.mlp"),
    ],
    ids=["depth after the decoder", "attention before the mlp", "parts before the layer"],
)
def test_the_first_difference_is_the_first_of_the_step(differ: list[str], first: str) -> None:
    made = _compared({path: OTHER if path in differ else SAME for path in IN_ORDER})
    assert _told(made)["first_difference"] == first


def test_modules_of_pipeline_stages_are_in_one_order() -> None:
    """The last stage has the prediction depths, and comes after the first."""
    first = _compared({path: SAME for path in IN_ORDER if not path.startswith(("decoder.layers.1", "mtp"))})
    last = _compared({path: OTHER for path in IN_ORDER if path.startswith(("decoder.layers.1", "mtp"))})
    told = _told(first, [_own(last)])
    paths = [each["path"] for each in told["modules"]]
    assert paths.index("decoder.layers.0") < paths.index("decoder.layers.1") < paths.index(f"{DEPTH}.enorm")
    assert told["first_difference"] == "decoder.layers.1.mlp"


EXPERTS = f"{LAYER}.mlp.experts"


@pytest.mark.parametrize(
    "outputs",
    [
        (torch.ones(5, 4), torch.zeros(5, 4)),
        (torch.ones(5, 4), torch.zeros(6, 4)),
        (torch.ones(2, 1, 4), torch.zeros(3, 1, 4)),
    ],
    ids=["rows of tokens", "other rows of tokens", "another shape"],
)
def test_outputs_without_counterpart_are_not_compared(outputs: tuple[Tensor, Tensor]) -> None:
    made = _compared({EXPERTS: outputs, f"{LAYER}.mlp": OTHER})
    assert not any(each.failed for each in made._taps)
    told = _told(made)
    experts, mlp = told["modules"]
    assert experts == {
        "path": EXPERTS,
        "changed_share": None,
        "relative_difference": None,
        "largest_difference": None,
    }
    assert mlp["changed_share"] == 1 and told["first_difference"] == f"{LAYER}.mlp"
    assert told["outputs_not_comparable"] == 1
    lines = _paired({"step": 3, "text": "mask", **told}).splitlines()
    assert [line.split() for line in lines if EXPERTS in line] == [[EXPERTS, "not", "comparable"]]


def test_one_rank_that_cannot_compare_leaves_no_share_of_the_others() -> None:
    made = _compared({LAYER: SAME})
    told = _told(made, [_own(_compared({LAYER: (torch.ones(2, 1, 4), torch.ones(1, 1, 4))}))])
    assert told["modules"][0]["changed_share"] is None and told["outputs_not_comparable"] == 1


def test_outputs_without_room_are_said_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_megatron.scope.lab.pair.default_limit_mib", lambda: 0.0)
    made = _compared({LAYER: OTHER})
    told = _told(made, [_own(_compared({f"{LAYER}.mlp": OTHER}))])
    assert told["outputs_left_out"] == 2 and told["first_difference"] is None
    (line,) = [line for line in _paired({"step": 3, "text": "mask", **told}).splitlines() if "first" in line]
    assert "none (2 outputs had no room in memory and were not compared)" in line
