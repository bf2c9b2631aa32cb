"""Whole tensors into the parts of them that this rank holds, as Megatron itself describes its sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of one tensor of the unsharded model, as this rank holds it."""

    name: str
    """The tensor's name in the unsharded model: ``decoder.layers.17.mlp.linear_fc1.weight``."""

    shape: tuple[int, ...]
    """The whole tensor's shape."""

    region: tuple[slice, ...]
    """Where the piece lies in it."""

    tensor: Tensor
    """The piece: a view of ``source``."""

    source: torch.nn.Parameter
    """The parameter that the piece is part of; it may be several pieces, as gate and up are."""


def parts(chunks: Sequence[torch.nn.Module]) -> Iterator[Part]:
    """Every piece of a parameter that this rank's model ``chunks`` hold (bare: without DDP), under tensor,
    pipeline and virtual pipeline parallelism. The copy of a tied embedding on the last pipeline stage
    has the embedding's name."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for index, chunk in enumerate(chunks):
        if len(chunks) > 1:
            # Layer offsets are computed from the current virtual rank.
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        parameters = {id(each): (name, each) for name, each in chunk.named_parameters()}
        for sharded in nested_values(chunk.sharded_state_dict()):  # type: ignore[operator]
            if not isinstance(sharded, ShardedTensor | ShardedTensorFactory):
                continue
            if id(sharded.data) not in parameters:
                continue
            local, parameter = parameters[id(sharded.data)]
            built = sharded.build() if isinstance(sharded, ShardedTensorFactory) else sharded
            for piece in nested_values({"built": built}):
                lead = piece.prepend_axis_num
                offsets = piece.global_offset[lead:]
                yield Part(
                    name=_unsharded_name(chunk, local),
                    shape=tuple(piece.global_shape[lead:]),
                    region=tuple(slice(o, o + n) for o, n in zip(offsets, piece.local_shape, strict=True)),
                    tensor=piece.data.detach().view(piece.local_shape),
                    source=parameter,
                )


def place(whole: Mapping[str, Tensor], chunks: Sequence[torch.nn.Module]) -> None:
    """Copy this rank's parts of the ``whole`` tensors (an unsharded state, as ``to_megatron`` makes it)
    into ``chunks``, in the parameters' dtype.

    Raises ``CheckpointError`` when a tensor is missing or has another shape; nothing is copied then.
    An optimizer with master weights must be told: ``optimizer.reload_model_params()``.
    """
    wanted = list(parts(chunks))
    problems = []
    for part in wanted:
        found = whole.get(part.name)
        if found is None:
            problems.append(f"{part.name} is missing")
        elif tuple(found.shape) != part.shape:
            problems.append(f"{part.name} is {tuple(found.shape)}, expected {part.shape}")
    if problems:
        raise CheckpointError(
            f"{len(problems)} tensors do not fit the model: {'; '.join(problems[:8])}. Check that the "
            "configuration describes the model that the weights belong to"
        )
    with torch.no_grad():
        for part in wanted:
            part.tensor.copy_(whole[part.name][part.region])


def _unsharded_name(chunk: Any, local: str) -> str:
    if local == "output_layer.weight" and getattr(chunk, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    if not local.startswith("decoder.layers."):
        return local
    _, _, index, rest = local.split(".", 3)
    return f"decoder.layers.{chunk.decoder.layers[int(index)].layer_number - 1}.{rest}"
