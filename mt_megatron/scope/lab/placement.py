"""Places of a rank's elements in whole tensors, so that every layout perturbs the same ones.

Parameters: Megatron-Core's sharded state dict says it of every parameter, as checkpoints need it: integers
in the parameter's place are taken apart in the same way, and where they come to lie is read off.
Activations: by the sequence, the samples of the step and the features that a module's output holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mt_megatron.errors import ConfigError
from mt_megatron.fp8.extra_state import without_extra_state
from mt_megatron.parallel.context_parallel import positions
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout
from mt_megatron.scope.lab.values import Places
from mt_megatron.scope.watch.shares import column_spread, is_batch_first, is_gated


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sequences and micro-batches of a step on this rank."""

    layout: RankLayout
    at: Coordinates
    seq_length: int
    """Of whole sequences, in tokens."""

    micro_batch_size: int
    sequence_parallel: bool


# Parameters.


def parameter_places(chunks: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Parameter, ParameterPlace]]:
    """Number of the chunk, local name, parameter and place of every trained parameter in ``chunks``, which
    are without wrappers. What is not in the state dict has places of this rank's own."""
    from megatron.core import parallel_state

    before = parallel_state.get_virtual_pipeline_model_parallel_rank()
    try:
        for number, chunk in enumerate(chunks):
            if len(chunks) > 1:
                # Layer offsets are computed from the current virtual rank.
                parallel_state.set_virtual_pipeline_model_parallel_rank(number)
            with without_extra_state():
                state: Mapping[str, Any] = chunk.sharded_state_dict()  # type: ignore[operator]
            for name, parameter in chunk.named_parameters():
                yield number, name, parameter, ParameterPlace(name, parameter, state.get(name))
    finally:
        if len(chunks) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(before)


class ParameterPlace:
    """Places of a parameter in the whole one; worked out when asked for."""

    def __init__(self, name: str, parameter: nn.Parameter, sharded: Any) -> None:
        """``sharded``: its entry in the state dict."""
        self._name = name
        self._parameter = parameter
        self._sharded = sharded

    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, with the experts' axis before it and without the layers'."""
        pieces = self._pieces(torch.empty(self._parameter.shape, dtype=torch.int64, device="meta"))
        return tuple(self._parameter.shape) if not pieces else self._shape(pieces[0])

    def places(self) -> Places:
        """On the host."""
        numel, shape = self._parameter.numel(), tuple(self._parameter.shape)
        local = torch.arange(numel, dtype=torch.int64).view(shape)
        pieces = self._pieces(local)
        if not pieces:
            return Places(parts=(torch.arange(numel),), shape=shape, whole=False)
        whole = torch.full((numel,), -1, dtype=torch.int64)
        shapes = {self._shape(piece) for piece in pieces}
        if len(shapes) != 1:
            raise ConfigError(f"found {self._name} in pieces of {shapes}; expected one whole tensor")
        (of_whole,) = shapes
        for piece in pieces:
            offset = piece.global_offset[self._layer_axes(piece) :]
            data = piece.data
            there = torch.zeros((1,) * data.dim(), dtype=torch.int64)
            strides = _strides(of_whole)
            for axis, (start, stride) in enumerate(zip(offset, strides, strict=True)):
                within = axis - (len(of_whole) - data.dim())
                if within < 0:
                    there = there + start * stride
                    continue
                along = (torch.arange(data.shape[within]) + start) * stride
                there = there + along.view([-1 if other == within else 1 for other in range(data.dim())])
            whole[data.reshape(-1)] = there.expand(data.shape).reshape(-1)
        if bool((whole < 0).any()):
            raise ConfigError(f"found elements of {self._name} that no checkpoint holds; expected every one")
        return Places(parts=_factored(whole.view(shape)), shape=of_whole)

    def _pieces(self, local: Tensor) -> list[Any]:
        sharded = self._sharded
        if sharded is None or not hasattr(sharded, "data"):
            return []
        build = getattr(sharded, "build_fn", None)
        if build is not None:
            with torch.no_grad():
                built = build(sharded.key, local, sharded.replica_id, sharded.flattened_range)
            return list(built.values() if isinstance(built, Mapping) else built)
        return [_Piece(local, sharded)]

    def _layer_axes(self, piece: Any) -> int:
        # Axes before a piece's own count stacked layers, and experts. Layers that hold different parameters
        # and depths of multi-token prediction are not stacked: their one axis, if any, is the experts'.
        # Upstream's GroupedMLP has the experts' axis in the data.
        within = piece.data.dim() > self._parameter.dim()
        experts = ".experts." in f".{self._name}" and not within
        return int(piece.prepend_axis_num) - int(experts)

    def _shape(self, piece: Any) -> tuple[int, ...]:
        return tuple(int(size) for size in piece.global_shape[self._layer_axes(piece) :])


class _Piece:
    """A sharded tensor with integers in the place of its data."""

    def __init__(self, data: Tensor, sharded: Any) -> None:
        self.data = data
        self.global_shape = sharded.global_shape
        self.global_offset = sharded.global_offset
        self.prepend_axis_num = sharded.prepend_axis_num


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _factored(whole: Tensor) -> tuple[Tensor, ...]:
    """Vectors along each dimension whose sums are ``whole``; the flat tensor where there are none."""
    if whole.dim() == 0 or whole.numel() == 0:
        return (whole.reshape(-1),)
    origin = whole[(0,) * whole.dim()]
    parts, total = [], torch.zeros((1,) * whole.dim(), dtype=torch.int64)
    for dim in range(whole.dim()):
        along = whole[tuple(slice(None) if other == dim else 0 for other in range(whole.dim()))]
        part = along if dim == 0 else along - origin
        parts.append(part.clone())
        total = total + part.view([-1 if other == dim else 1 for other in range(whole.dim())])
    return tuple(parts) if torch.equal(total, whole) else (whole.reshape(-1),)


# Activations.


def activation_places(
    module: nn.Module, path: str, tensor: Tensor, microbatch: int, geometry: Geometry
) -> Places:
    """Places of the elements of ``tensor``, an output of ``module`` or its gradient, in [sequence, samples
    of the step, features], on the device of ``tensor``. This rank's own places where it is not [tokens of
    this rank, micro-batch, features] (embeddings' tables: [micro-batch, tokens, features])."""
    device = tensor.device
    swapped = tensor.dim() == 3 and is_batch_first(module)
    tokens = _tokens(tensor.transpose(0, 1) if swapped else tensor, geometry)
    if tokens is None or microbatch < 0:
        return Places(
            parts=(torch.arange(tensor.numel(), device=device),), shape=tuple(tensor.shape), whole=False
        )
    features = tensor.shape[2]
    of_whole, columns = _features(module, path, features, geometry)
    first = (microbatch * geometry.layout.dp + geometry.at.dp) * geometry.micro_batch_size
    samples = torch.arange(geometry.micro_batch_size) + first
    # How many samples a step has may change while batches grow: their number comes before the sequence's.
    rows = tokens * of_whole, samples * (geometry.seq_length * of_whole)
    parts = (*(rows[::-1] if swapped else rows), columns)
    shape = (geometry.seq_length, int(samples[-1]) + 1, of_whole)
    return Places(parts=tuple(part.to(device) for part in parts), shape=shape)


def activation_place(index: Sequence[int], seq_length: int, features: int) -> int:
    """Flat place of [position, sample of the step, feature], as ``activation_places`` numbers them."""
    position, sample, feature = index
    return (sample * seq_length + position) * features + feature


def output_size(module: nn.Module) -> int | None:
    """Features of the whole output of ``module``, a linear; None for others."""
    size = getattr(module, "output_size", None)
    if isinstance(size, int):
        return size
    # Transformer Engine's linears have another name for it, and the column-parallel ones this rank's number.
    own = getattr(module, "out_features", None)
    if not isinstance(own, int):
        return None
    ranks = getattr(getattr(module, "config", None), "tensor_model_parallel_size", 1)
    return own * int(ranks) if column_spread(module) == "columns" else own


def features_of(module: nn.Module) -> int | None:
    """Features of ``module``'s whole output; None where it does not say."""
    size = output_size(module)
    if size is not None:
        return size
    config = getattr(module, "config", None)
    if _is_core_attention(module):
        partition = getattr(module, "hidden_size_per_partition", None)
        return None if partition is None else int(partition) * int(config.tensor_model_parallel_size)  # type: ignore[union-attr]
    return int(config.hidden_size) if config is not None and hasattr(config, "hidden_size") else None


def _tokens(tensor: Tensor, geometry: Geometry) -> Tensor | None:
    """Positions in the sequence of the rows of ``tensor``."""
    if tensor.dim() != 3 or tensor.shape[1] != geometry.micro_batch_size:
        return None
    layout, at = geometry.layout, geometry.at
    length = geometry.seq_length // layout.cp
    own = positions(at.cp, layout.cp, length) if layout.cp > 1 else torch.arange(length)
    if tensor.shape[0] == length:
        return own
    part = length // layout.tp
    if geometry.sequence_parallel and tensor.shape[0] == part:
        return own[at.tp * part : (at.tp + 1) * part]
    return None


def _features(module: nn.Module, path: str, features: int, geometry: Geometry) -> tuple[int, Tensor]:
    """Features of the whole output, and the numbers of those that are here."""
    own, size, rank = torch.arange(features), geometry.layout.tp, geometry.at.tp
    split = column_spread(module) == "columns" or _is_core_attention(module)
    if size == 1 or not split:
        return features, own
    if is_gated(module, path):
        # This rank's gates, then this rank's values: of the whole, all gates come first.
        half = features // 2
        gates = torch.arange(half) + rank * half
        return features * size, torch.cat([gates, gates + half * size])
    return features * size, own + rank * features


def _is_core_attention(module: nn.Module) -> bool:
    return (
        hasattr(module, "attn_mask_type")
        and hasattr(module, "layer_number")
        and not hasattr(module, "linear_proj")
    )
