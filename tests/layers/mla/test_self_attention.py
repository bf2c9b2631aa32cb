"""Multi-latent attention equals transformers' DeepSeek-V2 and V3, on one rank and over several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_megatron.errors import ConfigError
from tests.launch import run_ranks
from tests.second_lane import DAILY

SHAPES = 6 if DAILY else 3
BOUND = 1e-5
"""Largest difference of an output or gradient against its largest value, in fp32."""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(1, "tests.layers.mla.ranks:alone", SHAPES)[0]
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("mla_checkpoint"))
    return run_ranks(2, "tests.layers.mla.ranks:pair", 4 if DAILY else 1, folder, timeout=240)


def test_output_and_all_gradients_equal_transformers(alone: dict[str, Any]) -> None:
    assert len(alone["errors"]) == SHAPES and max(alone["errors"]) <= BOUND, alone["errors"]


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2])
def test_many_shapes_equal_transformers(world: int, record_property: Callable[[str, object], None]) -> None:
    for found in run_ranks(world, "tests.layers.mla.ranks:many", 80, timeout=600):
        record_property("largest relative error of 80 shapes", max(found))
        assert len(found) == 80 and max(found) <= BOUND, max(found)


def test_without_mscale_it_is_another_attention(alone: dict[str, Any]) -> None:
    assert alone["without mscale"] > 1000 * BOUND


def test_weights_in_half_rotated_order_are_others(alone: dict[str, Any]) -> None:
    assert alone["half rotated"] > 1000 * BOUND


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "tp2 sp recomputed"])
def test_two_tensor_parallel_ranks_equal_transformers(pair: list[dict[str, Any]], layout: str) -> None:
    for result in pair:
        assert max(result[layout]) <= BOUND, result[layout]


@pytest.mark.parametrize("way", ["up", "selective", "both"])
def test_recomputation_changes_no_bit(alone: dict[str, Any], way: str) -> None:
    assert alone["recomputation"][way]["equal"]


def test_recomputed_up_projections_are_not_kept(alone: dict[str, Any]) -> None:
    found = alone["recomputation"]
    assert found["up"]["kept"] == found["both"]["kept"] == [False] * 3
    assert found["none"]["kept"] == found["selective"]["kept"] == [True] * 3


def test_a_graph_that_is_kept_is_recomputed_again(alone: dict[str, Any]) -> None:
    assert alone["twice"]


def test_what_is_kept_all_the_same_is_said(alone: dict[str, Any]) -> None:
    (line,) = alone["copies"]
    assert line.startswith("recompute_mla_up_proj: queries, keys and values are kept all the same")


def test_a_down_projection_can_be_frozen(alone: dict[str, Any]) -> None:
    assert alone["frozen"] == {"no gradient": True, "others": True}


@pytest.mark.parametrize("way", ["borders", "packed", "packed, angles given", "mask"])
def test_documents_attend_to_themselves_alone(alone: dict[str, Any], way: str) -> None:
    assert alone["documents"][way] <= BOUND


def test_documents_that_are_not_kept_apart_are_noticed(alone: dict[str, Any]) -> None:
    assert alone["documents"]["not separated"] > 1000 * BOUND


@pytest.mark.parametrize("way", ["bf16", "autocast", "recomputed"])
def test_low_precision_is_near(alone: dict[str, Any], way: str) -> None:
    assert 1e-4 < alone["low precision"][way] < 5e-2


@pytest.mark.parametrize("layout", ["tp2", "tp2 qk_layernorm", "tp2 sp", "tp2 sp qk_layernorm"])
def test_replicated_parameters_stay_equal_and_right(pair: list[dict[str, Any]], layout: str) -> None:
    for result in pair:
        found = result["trained"][layout]
        assert found["equal"] and found["losses"] < 1e-5 and found["shared"] < 1e-5, found


def test_a_down_projection_that_nobody_sums_goes_apart(pair: list[dict[str, Any]]) -> None:
    assert not pair[0]["trained"]["tp2 sp unmarked"]["equal"]


def test_upstreams_sum_of_query_norms_would_be_wrong(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["trained"]["tp2 qk_layernorm as upstream"]["shared"] > 1e-4


def test_replicated_parameters_begin_equal_and_split_ones_do_not(pair: list[dict[str, Any]]) -> None:
    begun = pair[0]["initialised"]
    assert len(begun) == 7
    for name, equal in begun.items():
        assert equal == ("down_proj" in name or "layernorm" in name), name


def test_checkpoints_load_at_another_tensor_parallel_size(pair: list[dict[str, Any]]) -> None:
    for result in pair:
        found = result["checkpoint"]
        assert found["tp2"] == 0 and found["tp1"] < 1e-6, found
        assert found["tp1 before"] > 1e-2 and found["tp2 before"] > 1e-2


@pytest.mark.parametrize("way", ["plain", "recomputed"])
def test_a_sequence_over_two_context_ranks_equals_transformers(pair: list[dict[str, Any]], way: str) -> None:
    for result in pair:
        assert result["context"][way] <= BOUND


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("groups", "num_query_groups is 1"),
        ("rotary size", "qk_pos_emb_head_dim"),
        ("interleaved", "rotary_interleaved"),
        ("fusion", "apply_rope_fusion"),
        ("latent", "kv_lora_rank"),
        ("cache", "inference_params"),
        ("cross", "key_value_states"),
        ("context", "packed sequences"),
        ("angles", "rotary angles"),
        ("few angles", "rotary angles of 2 positions"),
        ("percent", "rotary_percent is 0.5"),
        ("theta", "rotary_base is 77777"),
        ("spec alone", "multi_latent_attention"),
        ("split", "ReplicatedLinear"),
        ("bias", "bias=True"),
    ],
)
def test_what_cannot_be_is_said(alone: dict[str, Any], what: str, words: str) -> None:
    assert words in alone["refusals"][what], alone["refusals"][what]


@pytest.mark.parametrize(
    ("features", "values", "refused"),
    [
        (("mla", "moe"), {"rope_type": "yarn", "rotary_base": None}, True),
        (("mla", "moe"), {"rope_type": "rope", "rotary_base": 5e5}, True),
        (("mla", "moe"), {"rope_type": "rope", "rotary_base": 1e4}, False),
        (("mla", "moe", "rope"), {"rope_type": "yarn", "rotary_base": 5e5}, False),
        (None, {"rope_type": "yarn", "rotary_base": 5e5}, False),
    ],
)
def test_angles_of_a_model_that_does_not_know_the_configuration_are_refused(
    monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...] | None, values: dict[str, Any], refused: bool
) -> None:
    from mt_megatron.layers.mla.self_attention import _require_fitted

    chosen = None if features is None else frozenset(features)
    monkeypatch.setattr("mt_megatron.patching.in_force._chosen", chosen)
    expected = (
        pytest.raises(ConfigError, match="expected rope among the features") if refused else nullcontext()
    )
    with expected:
        _require_fitted(SimpleNamespace(**values))


def turned_by_definition(t: torch.Tensor, angles: torch.Tensor, factor: float) -> torch.Tensor:
    """Each pair times the rotation matrix of its angle."""
    cos, sin = factor * torch.cos(angles), factor * torch.sin(angles)
    matrices = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
    return (matrices @ t.unflatten(-1, (-1, 2)).unsqueeze(-1)).squeeze(-1).flatten(-2)


@pytest.mark.parametrize("by_parts", [False, True])
def test_rotation_is_multiplication_by_matrices(monkeypatch: pytest.MonkeyPatch, by_parts: bool) -> None:
    from mt_megatron.layers.mla import self_attention
    from mt_megatron.layers.mla.self_attention import keys_of, rotated_queries

    if by_parts:
        monkeypatch.setattr(self_attention, "_turned", self_attention._turned_by_parts)

    torch.manual_seed(1)
    query, key, shared = torch.randn(5, 2, 3, 10), torch.randn(5, 2, 3, 12)[..., 3:10], torch.randn(5, 2, 4)
    query, key, shared, angles = (t.double() for t in (query, key, shared, torch.randn(5, 2, 2)))
    found = rotated_queries(query, angles, 1.3)
    wanted = turned_by_definition(query[..., 6:], angles.unsqueeze(2), 1.3)
    assert torch.equal(found[..., :6], query[..., :6])
    torch.testing.assert_close(found[..., 6:], wanted)
    keys = keys_of(key, shared, angles, 1.3)
    assert torch.equal(keys[..., :7], key)
    turned = turned_by_definition(shared, angles, 1.3).unsqueeze(2)
    torch.testing.assert_close(keys[..., 7:], turned.expand(-1, -1, 3, -1))


def test_gradients_of_rotation_are_those_of_differences() -> None:
    from mt_megatron.layers.mla.self_attention import keys_of, rotated_queries

    torch.manual_seed(2)
    query, key, shared, angles = (
        torch.randn(*size, dtype=torch.float64) for size in ((3, 2, 2, 7), (3, 2, 2, 3), (3, 2, 4), (3, 1, 2))
    )
    assert torch.autograd.gradcheck(lambda q: rotated_queries(q, angles, 1.3), (query.requires_grad_(),))
    inputs = (key.requires_grad_(), shared.requires_grad_())
    assert torch.autograd.gradcheck(lambda k, s: keys_of(k, s, angles, 1.3), inputs)
