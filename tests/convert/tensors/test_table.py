"""Packing by a conversion table: an independent reading of the layout, round trips, and refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mt_megatron.convert.tensors.table import Sizes, from_megatron, to_megatron
from mt_megatron.errors import CheckpointError
from mt_megatron.models.weights import TensorRow

SIZES = Sizes(
    num_layers=2,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=10,
    padded_vocab_size=16,
)
TABLE = {
    "embedding": TensorRow(sources=("embed",), vocabulary=True),
    "layers.{layer}.qkv": TensorRow(
        sources=("l.{layer}.q", "l.{layer}.k", "l.{layer}.v"), packing="query_groups"
    ),
    "layers.{layer}.fc1": TensorRow(sources=("l.{layer}.gate", "l.{layer}.up"), packing="stacked"),
    "norm": TensorRow(sources=("norm",)),
}


def published() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {"embed": torch.randn(10, 8), "norm": torch.randn(8)}
    for layer in range(2):
        weights |= {
            f"l.{layer}.q": torch.randn(24, 8),
            f"l.{layer}.k": torch.randn(8, 8),
            f"l.{layer}.v": torch.randn(8, 8),
            f"l.{layer}.gate": torch.randn(12, 8),
            f"l.{layer}.up": torch.randn(12, 8),
        }
    return weights


def test_query_groups_hold_their_own_heads_key_and_value() -> None:
    weights = published()
    packed = to_megatron(weights, TABLE, SIZES)["layers.1.qkv"]
    query, key, value = (weights[f"l.1.{name}"].reshape(-1, 4, 8) for name in "qkv")
    expected = [
        query[0],
        query[1],
        query[2],
        key[0],
        value[0],
        query[3],
        query[4],
        query[5],
        key[1],
        value[1],
    ]
    assert torch.equal(packed, torch.cat(expected))


def test_gate_lies_above_up_and_padding_is_zero() -> None:
    weights = published()
    packed = to_megatron(weights, TABLE, SIZES)
    assert torch.equal(packed["layers.0.fc1"], torch.cat([weights["l.0.gate"], weights["l.0.up"]]))
    assert packed["embedding"].shape == (16, 8)
    assert not packed["embedding"][10:].any() and torch.equal(packed["embedding"][:10], weights["embed"])


def test_back_again_is_equal_to_the_bit() -> None:
    weights = published()
    back = from_megatron(to_megatron(weights, TABLE, SIZES), TABLE, SIZES)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_results_share_no_memory_with_their_source() -> None:
    weights = published()
    packed = to_megatron(weights, TABLE, SIZES)
    packed["norm"].zero_()
    assert weights["norm"].any()


def test_missing_and_unknown_names_are_all_told() -> None:
    weights = published()
    del weights["l.1.k"]
    weights["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"1 missing \['l.1.k'\], 1 unknown \['extra'\]"):
        to_megatron(weights, TABLE, SIZES)
    packed = to_megatron(published(), TABLE, SIZES)
    del packed["norm"]
    with pytest.raises(CheckpointError, match=r"missing \['norm'\]"):
        from_megatron(packed, TABLE, SIZES)


def test_empty_extra_states_are_ignored() -> None:
    packed = to_megatron(published(), TABLE, SIZES)
    packed["layers.0.qkv._extra_state"] = torch.empty(0)
    assert "l.0.q" in from_megatron(packed, TABLE, SIZES)


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(CheckpointError, match="10 vocabulary rows, expected 11"):
        to_megatron(published(), TABLE, dataclasses.replace(SIZES, vocab_size=11))
