"""Distributed checkpoints of grouped experts: the same tensors, names and slices as ``SequentialMLP``'s.

Every expert is a tensor of its own in the checkpoint, gate and up apart, whatever holds it in memory. A
slice of the flattened parameter, which is what the distributed optimizer keeps, covers slices of some of
these tensors, so its state too moves between both forms and to other tensor and expert parallel sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError

Offset = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where one parameter [experts, outputs, inputs] of this rank lies in the checkpoint's tensor."""

    experts: int
    first_expert: int
    all_experts: int
    shape: tuple[int, int]
    """(outputs, inputs) of an expert here."""

    halves: int
    """2 where the outputs are gate over up, which are split over ranks apart; else 1."""

    tensor_axis: int
    """0: the outputs are split over tensor parallel ranks, 1: the inputs."""

    tensor_rank: int
    tensor_size: int
    outer: tuple[Offset, ...]
    """Offsets of the axes before the experts', such as the layer's."""

    @property
    def part(self) -> tuple[int, int]:
        """Shape of what is one tensor of the checkpoint's grid."""
        return self.shape[0] // self.halves, self.shape[1]

    def offsets(self, expert: int, half: int) -> tuple[Offset, ...]:
        """Megatron-Core's (axis, position, pieces) of a part."""
        axis = len(self.outer)
        position = half * self.tensor_size + self.tensor_rank
        return (
            *self.outer,
            (axis, self.first_expert + expert, self.all_experts),
            (axis + 1 + self.tensor_axis, position, self.tensor_size * self.halves),
        )

    def parts(self) -> Iterator[tuple[int, tuple[Offset, ...]]]:
        """Every part's start in the flattened parameter, with its offsets."""
        size = self.part[0] * self.part[1]
        for expert in range(self.experts):
            for half in range(self.halves):
                yield (expert * self.halves + half) * size, self.offsets(expert, half)


def sharded_state_dict(module: Any, prefix: str, sharded_offsets: tuple[Offset, ...]) -> dict[str, Any]:
    """``GroupedMLP.sharded_state_dict``. Raises ConfigError with ``moe_extended_tp``."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if module.moe_extended_tp:
        raise ConfigError(
            "distributed checkpoints know nothing of moe_extended_tp; use "
            "--expert-model-parallel-size without it"
        )
    copies = parallel_state.get_data_modulo_expert_parallel_rank(with_context_parallel=True)
    state: dict[str, Any] = {}
    for name, linear in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
        layout = _layout(module, name, sharded_offsets)
        state[f"{prefix}{name}"] = ShardedTensorFactory(
            f"{prefix}experts.{linear}.weight",
            getattr(module, name),
            partial(_build, layout),
            partial(_merge, layout),
            (0, 0, copies),
        )
    return state | _extra_states(module, prefix, sharded_offsets, copies)


def _layout(module: Any, name: str, outer: tuple[Offset, ...]) -> _Layout:
    from megatron.core import parallel_state

    experts, outputs, inputs = getattr(module, name).shape
    return _Layout(
        experts=experts,
        first_expert=parallel_state.get_expert_model_parallel_rank() * experts,
        all_experts=parallel_state.get_expert_model_parallel_world_size() * experts,
        shape=(outputs, inputs),
        halves=2 if name == "weight1" and module.config.gated_linear_unit else 1,
        tensor_axis=0 if name == "weight1" else 1,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        outer=tuple(outer),
    )


@torch.no_grad()
def _build(
    layout: _Layout, key: str, data: Tensor, replica_id: Any, flattened_range: slice | None
) -> list[Any]:
    """The checkpoint's tensors that ``data`` covers: the whole parameter, or a slice of it flattened."""
    from megatron.core.dist_checkpointing import ShardedTensor

    common = {"replica_id": replica_id, "prepend_axis_num": len(layout.outer) + 1}
    size = layout.part[0] * layout.part[1]
    found = []
    if flattened_range is None:
        flat = data.reshape(-1)
        for start, offsets in layout.parts():
            part = flat[start : start + size].view(layout.part)
            found.append(ShardedTensor.from_rank_offsets(key, part, *offsets, **common))
        return found
    for start, offsets in layout.parts():
        first, last = max(start, flattened_range.start), min(start + size, flattened_range.stop)
        if first < last:
            found.append(
                ShardedTensor.from_rank_offsets_flat(
                    key,
                    data[first - flattened_range.start : last - flattened_range.start],
                    layout.part,
                    *offsets,
                    flattened_range=slice(first - start, last - start),
                    **common,
                )
            )
    return found


@torch.no_grad()
def _merge(layout: _Layout, parts: list[Tensor]) -> Tensor:
    """What ``_build`` took apart."""
    merged = torch.cat(parts)
    return merged if merged.dim() == 1 else merged.view(layout.experts, *layout.shape)


def _extra_states(module: Any, prefix: str, outer: tuple[Offset, ...], copies: int) -> dict[str, Any]:
    """The empty objects that ``SequentialMLP`` has for each linear, for the sake of Transformer Engine."""
    from megatron.core import parallel_state
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

    experts = module.num_local_experts
    first = parallel_state.get_expert_model_parallel_rank() * experts
    everyone = parallel_state.get_expert_model_parallel_world_size() * experts
    replica_id = (0, parallel_state.get_tensor_model_parallel_rank(), copies)
    return {
        f"{prefix}expert{expert}.{linear}._extra_state": make_sharded_object_for_checkpoint(
            None,
            f"{prefix}experts.{linear}._extra_state",
            (*outer, (len(outer), expert, everyone)),
            replica_id,
        )
        for expert in range(first, first + experts)
        for linear in ("linear_fc1", "linear_fc2")
    }
