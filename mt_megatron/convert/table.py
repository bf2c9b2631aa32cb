"""Whole tensors packed into Megatron's and back, as the rows of a family's conversion table say.

Both directions read the same rows, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mt_megatron.errors import CheckpointError
from mt_megatron.models.weights import TensorRow

Table = Mapping[str, TensorRow]
"""Name in an unsharded Megatron model (tensor and pipeline size 1) -> its row."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What packing needs to know of a model."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """Entries on the published side."""

    padded_vocab_size: int
    """Entries in Megatron."""

    @classmethod
    def of(cls, config: Any, padded_vocab_size: int) -> Sizes:
        """The sizes of a training configuration's model."""
        model = config.model
        return cls(
            num_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups or model.num_attention_heads,
            kv_channels=model.kv_channels or model.hidden_size // model.num_attention_heads,
            vocab_size=model.vocab_size,
            padded_vocab_size=padded_vocab_size,
        )


def to_megatron(weights: Mapping[str, torch.Tensor], table: Table, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Pack published ``weights`` (whole tensors) into an unsharded Megatron state.

    Rows that pad the vocabulary are zero. Raises ``CheckpointError`` naming every tensor that is
    missing and every tensor that no row mentions.
    """
    rows = _expand(table, sizes.num_layers)
    _check_names(weights, {name for row in rows.values() for name in row.sources}, "published")
    packed: dict[str, torch.Tensor] = {}
    for target, row in rows.items():
        parts = [weights[name] for name in row.sources]
        if row.packing == "query_groups":
            tensor = _pack_query_groups(parts, sizes)
        else:
            tensor = torch.cat(parts, dim=0)
        if row.vocabulary:
            _check_rows(row.sources[0], tensor, sizes.vocab_size)
            padding = tensor.new_zeros(sizes.padded_vocab_size - sizes.vocab_size, *tensor.shape[1:])
            tensor = torch.cat([tensor, padding], dim=0)
        packed[target] = tensor
    return packed


def from_megatron(state: Mapping[str, torch.Tensor], table: Table, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Unpack an unsharded Megatron ``state`` (empty ``_extra_state`` entries are ignored).

    Padding of the vocabulary is stripped. Raises ``CheckpointError`` as ``to_megatron`` does.
    """
    state = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    rows = _expand(table, sizes.num_layers)
    _check_names(state, set(rows), "Megatron")
    unpacked: dict[str, torch.Tensor] = {}
    for source, row in rows.items():
        tensor = state[source]
        if row.vocabulary:
            _check_rows(source, tensor, sizes.padded_vocab_size)
            tensor = tensor[: sizes.vocab_size]
        if row.packing == "query_groups":
            parts = _unpack_query_groups(tensor, sizes)
        else:
            parts = list(tensor.chunk(len(row.sources), dim=0))
        for name, part in zip(row.sources, parts, strict=True):
            unpacked[name] = part.clone()
    return unpacked


def _expand(table: Table, num_layers: int) -> dict[str, TensorRow]:
    rows: dict[str, TensorRow] = {}
    for name, row in table.items():
        for layer in range(num_layers) if "{layer}" in name else range(1):
            rows[name.format(layer=layer)] = TensorRow(
                sources=tuple(source.format(layer=layer) for source in row.sources),
                packing=row.packing,
                vocabulary=row.vocabulary,
            )
    return rows


def _pack_query_groups(parts: list[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    rest = parts[0].shape[1:]
    blocks = [part.reshape(sizes.num_query_groups, -1, *rest) for part in parts]
    return torch.cat(blocks, dim=1).reshape(-1, *rest)


def _unpack_query_groups(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    rest, head = tensor.shape[1:], sizes.kv_channels
    query = sizes.num_attention_heads // sizes.num_query_groups * head
    blocks = tensor.reshape(sizes.num_query_groups, query + 2 * head, *rest).split([query, head, head], dim=1)
    return [block.reshape(-1, *rest) for block in blocks]


def _check_names(found: Mapping[str, torch.Tensor], expected: set[str], side: str) -> None:
    missing, unknown = sorted(expected - set(found)), sorted(set(found) - expected)
    if missing or unknown:
        raise CheckpointError(
            f"the {side} tensors do not match the conversion table: {len(missing)} missing {missing[:8]}, "
            f"{len(unknown)} unknown {unknown[:8]}. Check that the configuration describes this model"
        )


def _check_rows(name: str, tensor: torch.Tensor, expected: int) -> None:
    if tensor.shape[0] != expected:
        raise CheckpointError(
            f"{name} has {tensor.shape[0]} vocabulary rows, expected {expected}; set --vocab-size to the "
            "model's own vocabulary"
        )
