"""Whole tensors packed into Megatron's and back by the rows of a family's conversion table.

Both directions read the same rows, so they cannot disagree.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import CheckpointError
from mt_megatron.models.weights import RotaryRows, TensorRow

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


def to_megatron(weights: Mapping[str, Tensor], table: Table, sizes: Sizes) -> dict[str, Tensor]:
    """Pack published ``weights`` (whole tensors) into an unsharded Megatron state.

    Rows that pad the vocabulary are zero. Raises ``CheckpointError`` naming every tensor that is
    missing and every tensor that no row mentions, and a repetition that is not one.
    """
    rows = expand(table, sizes.num_layers)
    check_names(
        weights,
        {name for row in rows.values() for name in row.sources},
        "published",
        optional={name for row in rows.values() for name in row.copies},
    )
    packed: dict[str, Tensor] = {}
    for target, row in rows.items():
        for name in row.copies:
            if name in weights:
                check_copy(name, weights[name], row.sources[0], weights[row.sources[0]])
        tensor = pack(row, [weights[name] for name in row.sources], sizes)
        if tensor is weights[row.sources[0]]:
            tensor = tensor.clone()
        if row.vocabulary:
            check_rows(row.sources[0], tensor.shape[0], sizes.vocab_size)
            padding = tensor.new_zeros(sizes.padded_vocab_size - sizes.vocab_size, *tensor.shape[1:])
            tensor = torch.cat([tensor, padding], dim=0)
        packed[target] = tensor
    return packed


def from_megatron(state: Mapping[str, Tensor], table: Table, sizes: Sizes) -> dict[str, Tensor]:
    """Unpack an unsharded Megatron ``state`` (empty ``_extra_state`` entries are ignored).

    Padding of the vocabulary is stripped. Raises ``CheckpointError`` as ``to_megatron`` does.
    """
    state = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    rows = expand(table, sizes.num_layers)
    check_names(state, set(rows), "Megatron")
    unpacked: dict[str, Tensor] = {}
    for source, row in rows.items():
        tensor = state[source]
        if row.vocabulary:
            check_rows(source, tensor.shape[0], sizes.padded_vocab_size)
            tensor = tensor[: sizes.vocab_size]
        for name, part in zip(row.sources, unpack(row, tensor, sizes), strict=True):
            unpacked[name] = part.clone()
        for name in row.copies if row.writes_copies else ():
            unpacked[name] = unpacked[row.sources[0]].clone()
    return unpacked


def expand(table: Table, num_layers: int) -> dict[str, TensorRow]:
    """Every single tensor's row: one for each layer and each expert that a row of ``table`` stands for."""
    rows: dict[str, TensorRow] = {}
    for name, row in table.items():
        layers = row.layers if row.layers is not None else tuple(range(num_layers))
        for layer, expert in itertools.product(
            layers if "{layer}" in name else (0,), range(row.experts) if "{expert}" in name else (0,)
        ):
            rows[name.format(layer=layer, expert=expert)] = replace(
                row,
                sources=tuple(source.format(layer=layer, expert=expert) for source in row.sources),
                layers=None,
                experts=1,
            )
    return rows


def pack(row: TensorRow, parts: list[Tensor], sizes: Sizes) -> Tensor:
    """The Megatron tensor of ``row`` from its published ``parts``, without padding. Of one part that is
    not reordered it is the part itself."""
    if row.rotary:
        parts = [_interleave(part, rows) for part, rows in zip(parts, row.rotary, strict=True)]
    if row.packing == "query_groups":
        return _pack_query_groups(parts, sizes)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=0)


def unpack(row: TensorRow, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
    """The published parts of a Megatron ``tensor`` without padding: views of it where it is possible."""
    if row.packing == "query_groups":
        parts = _unpack_query_groups(tensor, sizes)
    else:
        parts = list(tensor.chunk(len(row.sources), dim=0))
    if row.rotary:
        parts = [_halve(part, rows) for part, rows in zip(parts, row.rotary, strict=True)]
    return parts


def rows_in_parts(row: TensorRow, sizes: Sizes, first: int, last: int) -> tuple[list[tuple[int, int]], Sizes]:
    """Which rows of each published part the rows ``first`` to ``last`` of a ``query_groups`` tensor come
    from, and the sizes of a model of these alone. They must begin and end with a query group."""
    heads = sizes.num_attention_heads // sizes.num_query_groups
    group = (heads + 2) * sizes.kv_channels
    if first % group or last % group:
        raise CheckpointError(
            f"rows {first} to {last} of {row.sources[0]} and its neighbours are no whole query groups of "
            f"{group}; choose a tensor-parallel size that divides the {sizes.num_query_groups} query groups"
        )
    begin, end = first // group, last // group
    each = [heads * sizes.kv_channels, sizes.kv_channels, sizes.kv_channels]
    smaller = replace(sizes, num_query_groups=end - begin, num_attention_heads=heads * (end - begin))
    return [(begin * size, end * size) for size in each], smaller


def _pack_query_groups(parts: list[Tensor], sizes: Sizes) -> Tensor:
    rest = parts[0].shape[1:]
    blocks = [part.reshape(sizes.num_query_groups, -1, *rest) for part in parts]
    return torch.cat(blocks, dim=1).reshape(-1, *rest)


def _unpack_query_groups(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
    rest, head = tensor.shape[1:], sizes.kv_channels
    query = sizes.num_attention_heads // sizes.num_query_groups * head
    blocks = tensor.reshape(sizes.num_query_groups, query + 2 * head, *rest).split([query, head, head], dim=1)
    return [block.reshape(-1, *rest) for block in blocks]


def _interleave(part: Tensor, rows: RotaryRows | None) -> Tensor:
    return part if rows is None else _reordered(part, rows, (2, rows.size // 2))


def _halve(part: Tensor, rows: RotaryRows | None) -> Tensor:
    return part if rows is None else _reordered(part, rows, (rows.size // 2, 2))


def _reordered(part: Tensor, rows: RotaryRows, pairs: tuple[int, int]) -> Tensor:
    """``part`` with the rotated rows of each block read as a ``pairs`` matrix and transposed."""
    rest = part.shape[1:]
    blocks = part.reshape(-1, rows.block, *rest)
    turned = blocks[:, : rows.size].reshape(-1, *pairs, *rest).transpose(1, 2)
    turned = turned.reshape(-1, rows.size, *rest)
    return torch.cat([turned, blocks[:, rows.size :]], dim=1).reshape(part.shape)


def check_names(
    found: Collection[str], expected: Collection[str], side: str, optional: Collection[str] = ()
) -> None:
    """Raise ``CheckpointError`` that lists every expected name that is missing and every name that is
    neither expected nor optional."""
    names = set(found)
    missing, unknown = sorted(set(expected) - names), sorted(names - set(expected) - set(optional))
    if missing or unknown:
        raise CheckpointError(
            f"the {side} tensors do not match the conversion table: "
            f"{len(missing)} missing {listed(missing)}, {len(unknown)} unknown {listed(unknown)}. "
            "Check that the configuration describes this model"
        )


def listed(names: list[str], most: int = 200) -> str:
    """``names`` for an error: all of them, up to a readable number."""
    return str(names) if len(names) <= most else f"{names[:most]} and {len(names) - most} more"


def check_copy(name: str, copy: Tensor, original: str, tensor: Tensor) -> None:
    """Raise ``CheckpointError`` unless a repeated tensor is equal to what it repeats, to the bit."""
    if copy.shape != tensor.shape or copy.dtype != tensor.dtype or not torch.equal(copy, tensor):
        raise CheckpointError(
            f"{name} is not equal to {original}, which the model uses in its place: both would be needed. "
            "Check that the files belong together"
        )


def check_rows(name: str, found: int, expected: int) -> None:
    """Raise ``CheckpointError`` unless the vocabulary has the ``expected`` rows."""
    if found != expected:
        raise CheckpointError(
            f"{name} has {found} vocabulary rows, expected {expected}; set --vocab-size to the model's own "
            "vocabulary"
        )
