"""Published weights of random Llamas give Hugging Face's logits and gradients, whole and split in two."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.parity.conftest import Figures
from tests.parity.random_shapes import draw

BOUND = 1e-5
TARGET = "tests.parity.random_shapes:beside_hugging_face"


def _within(found: dict[str, float]) -> bool:
    # No implementation in fp32 is closer than its rounding.
    bound = max(BOUND, 1.5 * found["rounding"])
    return all(value <= bound for name, value in found.items() if name != "rounding")


@pytest.mark.parametrize(
    ("world", "sequence_parallel"),
    [
        pytest.param(1, False, id="tp1"),
        pytest.param(2, False, id="tp2"),
        pytest.param(2, True, id="tp2_sp", marks=pytest.mark.soak),
    ],
)
def test_logits_and_gradients_are_hugging_faces(
    seed: int, world: int, sequence_parallel: bool, figures: Figures
) -> None:
    shapes = draw(seed)
    found: list[dict[str, Any]] = run_ranks(world, TARGET, shapes, world, sequence_parallel)[0]
    figures({f"{name}_{index}": value for index, each in enumerate(found) for name, value in each.items()})
    for shape, each in zip(shapes, found, strict=True):
        assert _within(each), (shape, each)


def test_heads_in_another_order_are_noticed(seed: int) -> None:
    [found] = run_ranks(1, TARGET, draw(seed), 1, False, "swapped_keys")
    assert not any(_within(each) for each in found), found


def test_weights_come_back_to_the_bit(seed: int) -> None:
    [found] = run_ranks(1, "tests.parity.random_shapes:round_trip", draw(seed))
    assert found and all(found)
