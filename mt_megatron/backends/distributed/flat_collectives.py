"""Collectives of one buffer, with NCCL's rules for shapes: the number of elements decides, not the shape.

Gloo compares shapes: it refuses a matrix that is gathered into a flat buffer, and ``reduce_scatter`` of torch
2.13 ends the process. So both buffers are passed as one dimension. MCCL gets the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# The names that Megatron-Core 0.9.0 calls were renamed twice; the current ones do the same without a warning.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@functools.wraps(dist.all_gather_into_tensor)
def all_gather_flat(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """``all_gather_into_tensor`` of any two shapes whose numbers of elements fit."""
    _require_multiple("all_gather_into_tensor", "output", output_tensor, "input", input_tensor, group)
    return _all_gather(_flat(output_tensor), _flat(input_tensor), group=group, async_op=async_op)


@functools.wraps(dist.reduce_scatter_tensor)
def reduce_scatter_flat(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``reduce_scatter_tensor`` of any two shapes whose numbers of elements fit."""
    _require_multiple("reduce_scatter_tensor", "input", input, "output", output, group)
    return _reduce_scatter(_flat(output), _flat(input), op=op, group=group, async_op=async_op)


@functools.wraps(dist.all_to_all_single)
def all_to_all_flat(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``all_to_all_single`` of any two shapes. Split sizes count rows of the tensor that they are for."""
    into, given = split_sizes(output_split_sizes), split_sizes(input_split_sizes)
    if not into and not given:
        world = dist.get_world_size(group)
        for name, tensor in (("output", output), ("input", input)):
            if world > 0 and (not tensor.dim() or tensor.shape[0] % world):
                raise ValueError(
                    f"all_to_all_single: found {name} of shape {tuple(tensor.shape)} and no split sizes; "
                    f"expected a first dimension that {world} ranks can share equally"
                )
        if output.numel() != input.numel():
            raise ValueError(
                f"all_to_all_single: found an output of {output.numel()} elements and an input of "
                f"{input.numel()}; expected equal numbers without split sizes"
            )
        output, input = _flat(output), _flat(input)
    else:
        # Before the library: Gloo would raise what one call did wrong in a later barrier again.
        _require_sum("output", output, into, group)
        _require_sum("input", input, given, group)
    return dist.all_to_all_single(output, input, into, given, group=group, async_op=async_op)


def split_sizes(given: Sequence[int] | None) -> list[int]:
    """Megatron also gives numpy's arrays and tensors. Empty where there are none."""
    return [] if given is None else [int(size) for size in given]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # One that has gaps is left to the library, which refuses it.
    return tensor.view(-1) if tensor.dim() != 1 and tensor.is_contiguous() else tensor


def _require_sum(name: str, tensor: torch.Tensor, sizes: list[int], group: Any) -> None:
    world = dist.get_world_size(group)
    if world <= 0 or not sizes:
        return
    rows = tensor.shape[0] if tensor.dim() else 0
    if len(sizes) != world or sum(sizes) != rows:
        raise ValueError(
            f"all_to_all_single: found {name} of {rows} rows and split sizes {sizes}; expected {world} "
            f"sizes, one for each rank, which add up to {rows}"
        )


def _require_multiple(
    call: str, large_name: str, large: torch.Tensor, small_name: str, small: torch.Tensor, group: Any
) -> None:
    world = dist.get_world_size(group)
    # -1: this rank is no member, and torch does nothing.
    if world > 0 and large.numel() != world * small.numel():
        raise ValueError(
            f"{call}: found an {large_name} of shape {tuple(large.shape)} and an {small_name} of shape "
            f"{tuple(small.shape)}; expected {world} times as many elements in the {large_name}, one part "
            "for each rank"
        )
