"""Operations per token against torch's own count of an executed step, and against hand-made figures."""

from __future__ import annotations

from typing import Any

import pytest

from mt_megatron.models.flops import forward_flops
from mt_megatron.training.arguments import load_config
from mt_megatron.training.memory_estimate import padded_shape
from tests.models.executed import FLOPS, FLOPS_SHAPE


@pytest.mark.parametrize("index", range(len(FLOPS)), ids=FLOPS)
def test_torch_counts_the_same(executed: dict[str, list[Any]], index: int) -> None:
    found = executed["flops"][index]
    assert found["counted"] == found["executed"]
    assert found["family"] == found["training"], "MFU counts by the same definition"
    assert (found["executed"] > found["training"]) == ("recompute" in FLOPS[index])


def test_by_hand() -> None:
    flops = forward_flops(padded_shape(load_config([*FLOPS_SHAPE.split(), "--swiglu"])), 32)
    # Query 48, keys and values 2 x 24, projection 48, and three matrices of 80 for SwiGLU, all times 48.
    assert flops.layer_matrices == 2 * 48 * (48 + 48 + 48 + 3 * 80)
    assert flops.layer_attention == 2 * 2 * 32 * 48, "scores and weighted values over 32 tokens"
    assert flops.head == 2 * 48 * 96
    assert flops.training == 3 * (4 * (flops.layer_matrices + flops.layer_attention) + flops.head)


def test_llama_3_8b_takes_6_per_parameter_and_its_attention() -> None:
    config = load_config(["--model", "llama3_8b"])
    flops = forward_flops(padded_shape(config), 8192)
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # The embedding is looked up, norms are no matrices.
    assert flops.training == 6 * matrices + 12 * 32 * 8192 * 4096
