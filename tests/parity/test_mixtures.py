"""Published weights of random mixtures of experts give Hugging Face's logits, loss and gradients.

What is compared with is Hugging Face's implementation in fp64 throughout: in fp32 its own rounding would be
in every difference. Logits and loss are within 1e-5. So are gradients, relative to their largest element, or
within one and a half times of what Hugging Face's own gradients in fp32 are off for the same weights and
tokens. The gradient of an expert is proportional to the weights of its tokens, and a small weight is the
exponential of a distance between two router logits: what Hugging Face's own logits in fp32 may be off by is
the relative error of such a weight, whoever computes it. An expert that has nothing but a few such tokens
gets that as well.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.parity.conftest import Figures
from tests.parity.mixture_shapes import draw

BOUND = 1e-5
TARGET = "tests.parity.mixtures:beside_hugging_face"
FAMILIES = ("mixtral", "deepseek_v2", "deepseek_v3", "qwen3_moe")
IN_CI = {("mixtral", "ep2"), ("deepseek_v2", "one"), ("deepseek_v3", "tp2"), ("qwen3_moe", "pp2")}
LAYOUTS = ("one", "tp2", "ep2", "pp2")


def _within(found: dict[str, float]) -> bool:
    gradient = max(BOUND, 1.5 * found["rounding"])
    return (
        max(found["logits"], found["loss"]) <= BOUND
        and found["gradient"] <= gradient
        and found["experts"] <= max(gradient, found["routing"])
    )


@pytest.mark.parametrize(
    "grouped", [True, pytest.param(False, marks=pytest.mark.daily)], ids=["grouped", "sequential"]
)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family,
            layout,
            id=f"{family}-{layout}",
            marks=() if (family, layout) in IN_CI else pytest.mark.soak,
        )
        for family in FAMILIES
        for layout in LAYOUTS
    ],
)
def test_logits_and_gradients_are_hugging_faces(
    seed: int, family: str, layout: str, grouped: bool, figures: Figures
) -> None:
    shapes = draw(family, seed)
    world = 1 if layout == "one" else 2
    found: list[dict[str, Any]] = run_ranks(world, TARGET, shapes, layout, grouped)[0]
    figures({f"{name}_{index}": value for index, each in enumerate(found) for name, value in each.items()})
    for shape, each in zip(shapes, found, strict=True):
        assert _within(each), (shape, each)


def test_swapped_experts_are_noticed(seed: int) -> None:
    [found] = run_ranks(1, TARGET, draw("deepseek_v3", seed), "one", True, "swapped_experts")
    assert not any(_within(each) for each in found), found
