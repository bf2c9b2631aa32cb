"""Layers divided by cost: against every other division, and by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError
from mt_megatron.planning.cost import balanced_layout
from mt_megatron.planning.flops import forward_flops
from mt_megatron.planning.memory_estimate import padded_shape
from mt_megatron.planning.parameters import ModelShape
from mt_megatron.planning.pipeline_layout import chunk_layer_counts, resolved_layout

SHAPE = ModelShape(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    vocab_size=512,
    gated_linear_unit=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


def costs(shape: ModelShape, counts: Sequence[int]) -> list[float]:
    """What each chunk of ``counts`` costs, by the published rule."""
    flops = forward_flops(shape, 4096)
    kinds, found = iter(shape.pattern), []
    for count in counts:
        found.append(float(sum(flops.layer(bool(next(kinds))) for _ in range(count))))
    found[0] += 0.05 * flops.layer(bool(shape.pattern[0]))
    found[-1] += flops.head + flops.multi_token_prediction
    return found


def divisions(layers: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), parts - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *cuts, layers)))


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    layers = draw(st.integers(1, 9))
    experts = draw(st.sampled_from([None, 8]))
    kinds = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    return dataclasses.replace(
        SHAPE,
        num_layers=layers,
        vocab_size=draw(st.sampled_from([64, 512, 8192])),
        num_moe_experts=experts,
        moe_ffn_hidden_size=None if experts is None else draw(st.sampled_from([16, 400])),
        moe_layer_freq=tuple(kinds),
        mtp_num_layers=draw(st.sampled_from([None, 1])),
    )


@given(shape=shapes(), pp=st.integers(1, 4), chunks=st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_no_other_division_is_better(shape: ModelShape, pp: int, chunks: int) -> None:
    assume(shape.num_layers >= pp * chunks)
    found = balanced_layout(shape, pp, chunks)
    assert sum(found) == shape.num_layers and len(found) == pp * chunks and min(found) >= 1
    every = [costs(shape, counts) for counts in divisions(shape.num_layers, pp * chunks)]
    largest = min(map(max, every))
    mine = costs(shape, found)
    assert max(mine) == pytest.approx(largest)
    squares = min(sum(cost**2 for cost in each) for each in every if max(each) <= largest * (1 + 1e-9))
    assert sum(cost**2 for cost in mine) == pytest.approx(squares)


def test_deepseek_v3_on_sixteen_stages() -> None:
    config = load_config(["--model", "deepseek_v3", "--pipeline-model-parallel-size", "16"])
    found = balanced_layout(padded_shape(config), 16)
    # The output layer twice and one more layer are as much as three layers.
    assert found == [4] * 15 + [1]


def test_balanced_is_resolved_before_megatron_core_sees_it() -> None:
    argv = ["--model", "deepseek_v3", "--pipeline-model-parallel-size", "8", "--global-batch-size", "8"]
    plain = load_config([*argv, "--pipeline-model-parallel-layout", "balanced"])
    assert resolved_layout(plain) == [8, 8, 8, 8, 8, 8, 8, 5] == list(chunk_layer_counts(plain))
    given_counts = load_config([*argv, "--pipeline-model-parallel-layout", "8,8,8,8,8,8,7,6"])
    assert chunk_layer_counts(given_counts) == (8, 8, 8, 8, 8, 8, 7, 6)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_layers is 8; expected at least one for each"):
        balanced_layout(SHAPE, 3, 3)
    with pytest.raises(ConfigError, match="0 x 1"):
        balanced_layout(SHAPE, 0)
