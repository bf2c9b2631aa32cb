"""Whole tensors into this rank's shards, by Megatron's own description of its sharding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import CheckpointError

_GROUPED = re.compile(r"(.*\bexperts)\.weight([12])")
_GROUPED_LINEAR = re.compile(r"(.*\bexperts)\.(linear_fc[12]\.(?:weight|bias))\d+")
_SEQUENTIAL = re.compile(r"(.*\bexperts\.local_experts)\.\d+\.(.*)")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A shard of one tensor of the unsharded model, as this rank holds it."""

    name: str
    """The tensor's name in the unsharded model: ``decoder.layers.17.mlp.linear_fc1.weight``. Experts
    are named as ``SequentialMLP`` does, whichever kind they are."""

    shape: tuple[int, ...]
    """The whole tensor's shape."""

    region: tuple[slice, ...]
    """Where the shard lies in it."""

    tensor: Tensor
    """The shard: a view of ``source``."""

    source: Tensor
    """The parameter or buffer that the shard is part of; it may be several shards, as gate and up are."""


def parts(chunks: Sequence[torch.nn.Module]) -> Iterator[Part]:
    """Every shard of a parameter or persistent buffer that this rank's model ``chunks`` hold (bare: without
    DDP), under tensor, pipeline, virtual pipeline and expert parallelism. Copies of the embedding
    or the output layer on another pipeline stage have their names."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for index, chunk in enumerate(chunks):
        if len(chunks) > 1:
            # Layer offsets are computed from the current virtual rank.
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        tensors: dict[int, tuple[str, Tensor]] = {
            id(each): (name, each) for name, each in chunk.named_parameters()
        }
        tensors |= {id(each): (name, each) for name, each in chunk.named_buffers()}
        for sharded in nested_values(chunk.sharded_state_dict()):  # type: ignore[operator]
            if not isinstance(sharded, ShardedTensor | ShardedTensorFactory):
                continue
            if id(sharded.data) not in tensors:
                continue
            local, source = tensors[id(sharded.data)]
            built = sharded.build() if isinstance(sharded, ShardedTensorFactory) else sharded
            for shard in nested_values({"built": built}):
                if shard.data.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
                    raise CheckpointError(
                        f"{local} describes its parts by copies, which cannot be written into; use "
                        "SequentialMLP, or patch before the model is built"
                    )
                lead = shard.prepend_axis_num
                yield Part(
                    name=_unsharded_name(chunk, local, shard),
                    shape=tuple(shard.global_shape[lead:]),
                    region=_region(shard.global_offset[lead:], shard.local_shape),
                    tensor=shard.data.detach().view(shard.local_shape),
                    source=source,
                )


def place(whole: Mapping[str, Tensor], chunks: Sequence[torch.nn.Module]) -> None:
    """Copy this rank's parts of the ``whole`` tensors (an unsharded state, as ``to_megatron`` makes it)
    into ``chunks``, in the parameters' dtype.

    Raises ``CheckpointError`` when a tensor is missing or has another shape; nothing is copied then.
    An optimizer with master weights must be updated afterwards: ``optimizer.reload_model_params()``.
    """
    wanted = list(parts(chunks))
    check_parts(wanted, {name: tuple(tensor.shape) for name, tensor in whole.items()})
    fill(wanted, lambda part: whole[part.name][part.region])


def check_parts(wanted: Sequence[Part], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``CheckpointError`` unless every one of the ``wanted`` parts belongs to a tensor in ``found``
    (name -> shape) of the right shape."""
    problems = []
    for part in wanted:
        if part.name not in found:
            problems.append(f"{part.name} is missing")
        elif tuple(found[part.name]) != part.shape:
            problems.append(f"{part.name} is {tuple(found[part.name])}, expected {part.shape}")
    if problems:
        raise CheckpointError(
            f"{len(problems)} tensors do not fit the model: {'; '.join(problems[:8])}. Check that the "
            "configuration describes the model that the weights belong to"
        )


def fill(wanted: Sequence[Part], read: Callable[[Part], Tensor]) -> None:
    """Copy into each of ``wanted`` what ``read`` gives for it, in the parameter's dtype."""
    with torch.no_grad():
        for part in wanted:
            part.tensor.copy_(read(part))


def _region(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))


def _unsharded_name(chunk: Any, local: str, shard: Any) -> str:
    if local == "output_layer.weight" and getattr(chunk, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    sequential, linear = _SEQUENTIAL.fullmatch(local), _GROUPED_LINEAR.fullmatch(local)
    grouped = _GROUPED.fullmatch(local)
    # The last axis before the tensor's own counts the experts.
    expert = shard.global_offset[shard.prepend_axis_num - 1]
    if sequential:
        local = f"{sequential[1]}.{expert}.{sequential[2]}"
    elif linear:
        local = f"{linear[1]}.local_experts.{expert}.{linear[2]}"
    elif grouped:
        local = f"{grouped[1]}.local_experts.{expert}.linear_fc{grouped[2]}.weight"
    return _of_whole_model(chunk, local)


def _of_whole_model(chunk: Any, local: str) -> str:
    """``local`` with the layer's index in the whole model in place of the one in this chunk."""
    for block, layers in (("decoder.layers", "decoder"), ("mtp.layers", "mtp")):
        if local.startswith(block + "."):
            index, _, rest = local[len(block) + 1 :].partition(".")
            return f"{block}.{getattr(chunk, layers).layers[int(index)].layer_number - 1}.{rest}"
    return local
