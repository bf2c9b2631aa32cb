"""Operations per token against torch's own count of an executed step, and against hand-made figures."""

from __future__ import annotations

from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.planning.flops import forward_flops
from mt_megatron.planning.memory_estimate import padded_shape
from mt_megatron.planning.parameters import count_parameters
from tests.planning.executed import FLOPS, FLOPS_SHAPE


@pytest.mark.parametrize("index", range(len(FLOPS)), ids=FLOPS)
def test_torch_counts_the_same(executed: dict[str, list[Any]], index: int) -> None:
    found = executed["flops"][index]
    assert found["counted"] == found["executed"]
    assert found["family"] == found["training"], "MFU counts by the same definition"
    # Short sequences take torch's kernel, which wants latent attention's values padded.
    more = "recompute" in FLOPS[index] or "latent" in FLOPS[index]
    assert (found["executed"] > found["training"]) == more


def test_by_hand() -> None:
    flops = forward_flops(padded_shape(load_config([*FLOPS_SHAPE.split(), "--swiglu"])), 32)
    # Query 48, keys and values 2 x 24, projection 48, and three matrices of 80 for SwiGLU, all times 48.
    assert flops.matrices(False) == 2 * 48 * (48 + 48 + 48 + 3 * 80)
    assert flops.layer_attention == 2 * 2 * 32 * 48, "scores and weighted values over 32 tokens"
    assert flops.head == 2 * 48 * 96
    assert flops.training == 3 * (4 * (flops.matrices(False) + flops.layer_attention) + flops.head)


def test_llama_3_8b_takes_6_per_parameter_and_its_attention() -> None:
    config = load_config(["--model", "llama3_8b"])
    flops = forward_flops(padded_shape(config), 8192)
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # The embedding is looked up, norms are no matrices.
    assert flops.training == 6 * matrices + 12 * 32 * 8192 * 4096


def test_a_mixture_counts_what_a_token_uses() -> None:
    flops = forward_flops(padded_shape(load_config(["--model", "mixtral_8x7b"])), 4096)
    # Of the active parameters the embedding is looked up, and 65 norms of 4,096 are no matrices.
    matrices = 12_879_925_248 - 32000 * 4096 - 65 * 4096
    assert flops.training == 6 * matrices + 12 * 32 * 4096 * 4096


def test_deepseek_v3_by_hand() -> None:
    flops = forward_flops(padded_shape(load_config(["--model", "deepseek_v3"])), 4096)
    count = count_parameters(padded_shape(load_config(["--model", "deepseek_v3"])))
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    main = 6 * (count.active - 129280 * 7168 - norms) + 6 * 61 * 4096 * 128 * (192 + 128)
    # One more layer of the last kind, a projection of 2 h x h, and the output layer once more.
    layer = flops.layer(True) + 2 * 2 * 7168 * 7168 + flops.head
    assert flops.training == main + 3 * layer
    # The latent projections, and attention over keys of 192 and values of 128 dimensions.
    latent = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert flops.projections == 2 * latent and flops.layer_attention == 2 * 4096 * 128 * (192 + 128)
