"""Parameters and their gradients as pieces of the whole, by Megatron's own description of its sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mt_megatron.seams.taps import whole_name
from mt_megatron.training.model import Trainable

from .pieces import Piece

Value = Callable[[Any], tuple[Tensor, Tensor | None]]
"""From a parameter to what is wanted of it, and which elements of that are this rank's to tell."""


def parameter_pieces(trainable: Trainable, phase: str, stages: list[int], value: Value) -> list[Piece]:
    """``value`` of every parameter of this rank. ``stages`` holds the pipeline stage of every chunk."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.transformer.moe.experts import GroupedMLP

    from mt_megatron.layers.moe.experts import is_arranged

    pieces: list[Piece] = []
    chunks = trainable.bare_chunks()
    for index, (chunk, stage) in enumerate(zip(chunks, stages, strict=True)):
        if len(chunks) > 1:
            # Layer offsets are computed from the current virtual rank.
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        names = {id(parameter): name for name, parameter in chunk.named_parameters()}
        grouped = {
            id(parameter)
            for module in chunk.modules()
            if isinstance(module, GroupedMLP) and is_arranged(module)
            for parameter in module.parameters(recurse=False)
        }
        position = {name: at for at, name in enumerate(names.values())}
        for sharded in nested_values(chunk.sharded_state_dict()):  # type: ignore[operator]
            if not isinstance(sharded, ShardedTensor | ShardedTensorFactory) or id(sharded.data) not in names:
                continue
            parameter, local = sharded.data, names[id(sharded.data)]
            name = whole_name(chunk, local)
            if local == "output_layer.weight" and getattr(
                chunk, "share_embeddings_and_output_weights", False
            ):
                # The last stage's copy of the embedding, which a single process does not have.
                name = "embedding.word_embeddings.weight"
            for part, mask in _parts(sharded, *value(parameter)):
                # Leading axes count layers, which the name has, and experts, which that of one has.
                experts = 1 if id(parameter) in grouped else 0
                lead = part.prepend_axis_num - experts
                shape = tuple(part.global_shape[lead:])
                offsets, sizes = part.global_offset[lead:], (1,) * experts + tuple(part.local_shape)
                pieces.append(
                    Piece(
                        phase=phase,
                        name=name,
                        order=(stage, position[local]),
                        shape=shape,
                        index=tuple(
                            torch.arange(size) + offset for offset, size in zip(offsets, sizes, strict=True)
                        ),
                        tensor=part.data.detach().to("cpu", copy=True).reshape(sizes),
                        mask=None if mask is None else mask.to("cpu").reshape(sizes),
                    )
                )
    return pieces


def _parts(sharded: Any, value: Tensor, mask: Tensor | None) -> list[tuple[Any, Tensor | None]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def build(data: Tensor) -> list[Any]:
        sharded.data = data
        if not isinstance(sharded, ShardedTensorFactory):
            return [sharded]
        built = sharded.build()
        return [each for each in nested_values({"built": built}) if isinstance(each, ShardedTensor)]

    # A factory cuts its tensor into views; the mask has to be cut the same way.
    masks = [None] * len(build(value)) if mask is None else [part.data for part in build(mask)]
    return list(zip(build(value), masks, strict=True))


def current_value(parameter: Any) -> tuple[Tensor, None]:
    """The parameter itself."""
    return parameter.detach(), None


def reduced_gradient(trainable: Trainable) -> Value:
    """The gradient after every reduction, before clipping. The distributed optimizer leaves each
    data-parallel rank a part of it that is complete; the others are not this rank's to tell."""
    sharded = trainable.chunks[0].ddp_config.use_distributed_optimizer
    optimizers = getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer])

    def value(parameter: Any) -> tuple[Tensor, Tensor | None]:
        gradient: Tensor = parameter.main_grad.detach()
        if not sharded:
            return gradient, None
        owned = torch.zeros(gradient.numel(), dtype=torch.bool)
        for optimizer in optimizers:
            if parameter in optimizer.model_param_gbuf_map:
                part = optimizer._get_model_param_range_map(parameter)["param"]
                owned[part.start : part.end] = True
        return gradient, owned.view(gradient.shape)

    return value
