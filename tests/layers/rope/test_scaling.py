"""Stretched rotary positions are transformers', as numbers and in a whole model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mt_megatron.errors import ConfigError
from mt_megatron.layers.rope.scaling import (
    RopeScaling,
    inverse_frequencies,
    rope_scaling_of,
    rotary_factor,
    softmax_factor,
)
from tests.launch import run_ranks

PUBLISHED = {
    "Llama-3.1": (
        RopeScaling(rope_type="llama3", rotary_scaling_factor=8.0, original_max_position_embeddings=8192),
        128,
        500000.0,
    ),
    "Llama-3.2": (
        RopeScaling(rope_type="llama3", rotary_scaling_factor=32.0, original_max_position_embeddings=8192),
        64,
        500000.0,
    ),
    "DeepSeek-V2-Lite": (
        RopeScaling(rope_type="yarn", rotary_scaling_factor=40.0, mscale=0.707, mscale_all_dim=0.707),
        64,
        10000.0,
    ),
    "DeepSeek-V3": (
        RopeScaling(rope_type="yarn", rotary_scaling_factor=40.0, mscale=1.0, mscale_all_dim=1.0),
        64,
        10000.0,
    ),
    "Qwen2.5 at 131072": (
        RopeScaling(rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=32768),
        128,
        1000000.0,
    ),
    "two coefficients": (
        RopeScaling(
            rope_type="yarn",
            rotary_scaling_factor=16.0,
            mscale=1.2,
            mscale_all_dim=0.4,
            beta_fast=20.0,
            beta_slow=2.0,
        ),
        32,
        5000.0,
    ),
    "one pair in the ramp": (
        RopeScaling(rope_type="yarn", rotary_scaling_factor=3.0, original_max_position_embeddings=8),
        8,
        100.0,
    ),
    "linear": (RopeScaling(rope_type="linear", rotary_scaling_factor=2.5), 96, 10000.0),
}
"""Stretching, rotary size of a head and theta."""


def of_transformers(scaling: RopeScaling, dim: int, base: float) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: dict[str, Any] = {
        "rope_type": scaling.rope_type,
        "rope_theta": base,
        "factor": scaling.rotary_scaling_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
    if scaling.rope_type == "llama3":
        parameters |= {
            "low_freq_factor": scaling.rope_low_freq_factor,
            "high_freq_factor": scaling.rope_high_freq_factor,
        }
    if scaling.rope_type == "yarn":
        parameters |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.mscale_all_dim:
            parameters |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    config = LlamaConfig(head_dim=dim, rope_parameters=parameters, max_position_embeddings=131072)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, torch.device("cpu"))
    return frequencies, factor


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_and_factor_are_those_of_transformers(name: str) -> None:
    scaling, dim, base = PUBLISHED[name]
    wanted, factor = of_transformers(scaling, dim, base)
    found = inverse_frequencies(dim, base, scaling)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert math.isclose(rotary_factor(scaling), factor, rel_tol=1e-12)


@pytest.mark.parametrize("name", ["Llama-3.1", "DeepSeek-V3", "linear"])
def test_another_stretching_has_other_frequencies(name: str) -> None:
    scaling, dim, base = PUBLISHED[name]
    wanted, _ = of_transformers(scaling, dim, base)
    others = {
        "factor": replace(scaling, rotary_scaling_factor=scaling.rotary_scaling_factor * 2),
        "length": replace(scaling, original_max_position_embeddings=1024),
        "turns": replace(scaling, beta_fast=16.0, rope_high_freq_factor=8.0),
        "plain": RopeScaling(),
    }
    for kind, other in others.items():
        same = torch.allclose(inverse_frequencies(dim, base, other), wanted, rtol=1e-3, atol=0)
        # Linear stretching has a factor and nothing else.
        assert same == (name == "linear" and kind in ("length", "turns")), kind


def test_factors_of_the_scores_are_the_published_ones() -> None:
    lite, _, _ = PUBLISHED["DeepSeek-V2-Lite"]
    assert math.isclose(softmax_factor(lite), (0.0707 * math.log(40) + 1) ** 2)
    assert rotary_factor(lite) == 1.0
    one_coefficient = RopeScaling(rope_type="yarn", rotary_scaling_factor=4.0)
    assert math.isclose(rotary_factor(one_coefficient), 0.1 * math.log(4) + 1)
    assert softmax_factor(one_coefficient) == 1.0
    for other in ("rope", "linear", "llama3"):
        scaling = RopeScaling(rope_type=other, rotary_scaling_factor=4.0, mscale_all_dim=1.0)
        assert rotary_factor(scaling) == softmax_factor(scaling) == 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_type": "ntk"}, "expected one of rope, linear, llama3, yarn"),
        ({"rope_type": "linear", "rotary_scaling_factor": 0.5}, "rotary_scaling_factor is 0.5"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "beta_fast": 1.0}, "0 < beta_slow < beta_fast"),
        ({"rope_type": "llama3", "rope_low_freq_factor": 4.0}, "rope_low_freq_factor is 4.0"),
    ],
)
def test_what_no_formula_takes_is_an_error(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RopeScaling(**fields)


@pytest.mark.parametrize(("dim", "base"), [(7, 10000.0), (0, 10000.0), (8, 1.0)])
def test_what_cannot_be_rotated_is_an_error(dim: int, base: float) -> None:
    with pytest.raises(ConfigError, match="rotary positions of"):
        inverse_frequencies(dim, base, RopeScaling())


def test_a_config_without_the_fields_is_not_stretched() -> None:
    assert rope_scaling_of(object()) == RopeScaling()


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(1, "tests.layers.rope.ranks:everything")[0]
    return found


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "rope"])
def test_a_llama_equals_transformers(models: dict[str, Any], kind: str) -> None:
    assert models["logits"][kind] <= 1e-5


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_without_its_stretching_it_does_not(models: dict[str, Any], kind: str) -> None:
    assert models["not stretched"][kind] > 1e-2
    if kind == "yarn":
        assert models["without factor"] > 1e-3


def test_the_arguments_of_later_versions_mean_llama3(models: dict[str, Any]) -> None:
    assert models["arguments"] == {"model": True, "embedding": True, "default": True}


def test_packed_documents_are_stretched_alike(models: dict[str, Any]) -> None:
    assert models["packed"] <= 1e-6


def test_packed_documents_are_rotated_in_the_pairs_of_the_config(models: dict[str, Any]) -> None:
    """Upstream's function for packed sequences takes ``rotary_interleaved`` and drops it."""
    assert models["packed interleaved"] <= 1e-6


@pytest.mark.parametrize("other", ["bert", "t5", "mamba"])
def test_other_models_are_stretched_too(models: dict[str, Any], other: str) -> None:
    assert models[other]


def test_a_base_in_the_config_counts(models: dict[str, Any]) -> None:
    assert models["base"] and all(models["base"].values()), models["base"]


def test_unset_fields_change_no_bit(models: dict[str, Any]) -> None:
    assert models["off"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("two bases", "rotary_base is 5000 as the model's argument and 7000"),
        ("twice", "seq_len_interpolation_factor is set too"),
        ("twice by argument", "rope_scaling is set too"),
        ("no positions", "position_embedding_type"),
    ],
)
def test_contradictions_are_errors(models: dict[str, Any], what: str, words: str) -> None:
    assert words in models["refusals"][what]
