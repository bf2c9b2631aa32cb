"""Collectives of a list whose parts differ in size, which NCCL takes and other libraries refuse.

Megatron-Core 0.9.0 was written for NCCL. Gloo gathers equal shapes only, and Gloo of torch before 2.13 has
no ``reduce_scatter`` of a list. MCCL is reported to want equal sizes everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.backends.distributed.flat_collectives import all_to_all_flat, split_sizes


class _Works:
    """Several pending collectives as one, and what is left to do after them."""

    def __init__(self, works: list[Any], then: Callable[[], object] | None = None) -> None:
        self._works = works
        self._then = then

    def wait(self, *args: Any) -> bool:
        for work in self._works:
            work.wait(*args)
        then, self._then = self._then, None
        if then is not None:
            with torch.no_grad():
                then()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@functools.wraps(dist.all_gather)
def all_gather_of_any_sizes(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """``all_gather`` of equal or unequal shapes; unequal ones by one broadcast from each rank."""
    if all(part.shape == tensor_list[0].shape for part in tensor_list):
        return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)
    # All ranks list the same shapes, so all of them come here and skip the same empty parts.
    group = dist.group.WORLD if group is None else group
    with torch.no_grad():
        tensor_list[dist.get_rank(group)].copy_(tensor)
    works = [
        dist.broadcast(part, dist.get_global_rank(group, rank), group, async_op=True)
        for rank, part in enumerate(tensor_list)
        if part.numel()
    ]
    pending = _Works([work for work in works if work is not None])
    if async_op:
        return pending
    pending.wait()
    return None


@functools.wraps(dist.reduce_scatter)
def reduce_scatter_by_reduces(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``reduce_scatter`` of a list, by one reduce to each rank."""
    group = dist.group.WORLD if group is None else group
    own = dist.get_rank(group)
    # A reduce leaves half-made sums with the ranks that are not its target.
    parts = [part.clone() for part in input_list]
    works = [
        dist.reduce(part, dist.get_global_rank(group, rank), op, group, async_op=True)
        for rank, part in enumerate(parts)
        if part.numel()
    ]
    pending = _Works([work for work in works if work is not None], then=lambda: output.copy_(parts[own]))
    if async_op:
        return pending
    pending.wait()
    return None


@functools.wraps(dist.reduce_scatter)
def reduce_scatter_of_any_sizes(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``reduce_scatter`` of equal or unequal shapes; unequal ones by one reduce to each rank."""
    # All ranks list the same shapes, so all of them take the same way.
    if all(part.shape == input_list[0].shape for part in input_list):
        return dist.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    return reduce_scatter_by_reduces(output, input_list, op=op, group=group, async_op=async_op)


@functools.wraps(dist.all_to_all_single)
def all_to_all_of_any_sizes(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``all_to_all_single``; with split sizes, by sends and receives.

    A rank sees its own sizes alone and cannot tell whether all ranks' are equal. So the way depends on
    whether sizes are given, which must be the same on every rank.
    """
    into, given = split_sizes(output_split_sizes), split_sizes(input_split_sizes)
    if not into and not given:
        return all_to_all_flat(output, input, group=group, async_op=async_op)
    group = dist.group.WORLD if group is None else group
    world, own = dist.get_world_size(group), dist.get_rank(group)
    targets = _parts(output, into, world, "output")
    sources = _parts(input, given, world, "input")
    if targets[own].numel() != sources[own].numel():
        raise ValueError(
            f"all_to_all_single: rank {own} keeps {sources[own].numel()} elements of its input and expects "
            f"{targets[own].numel()}; make output_split_sizes[{own}] and input_split_sizes[{own}] agree"
        )
    with torch.no_grad():
        targets[own].copy_(sources[own].view_as(targets[own]))
    transfers = []
    for step in range(1, world):
        for call, part, peer in (
            (dist.isend, sources, (own + step) % world),
            (dist.irecv, targets, (own - step) % world),
        ):
            # The sender's and the receiver's sizes agree, so both leave out the same empty parts.
            if part[peer].numel():
                to = dist.get_global_rank(group, peer)
                transfers.append(dist.P2POp(call, part[peer], to, group))
    pending = _Works(dist.batch_isend_irecv(transfers) if transfers else [])
    if async_op:
        return pending
    pending.wait()
    return None


def _parts(tensor: torch.Tensor, sizes: list[int], world: int, name: str) -> tuple[torch.Tensor, ...]:
    rows = tensor.shape[0]
    sizes = sizes or [rows // world] * world
    if len(sizes) != world or sum(sizes) != rows:
        raise ValueError(
            f"all_to_all_single: found {name} of {rows} rows and split sizes {sizes}; expected {world} "
            f"sizes, one for each rank, which add up to {rows}"
        )
    parts: tuple[torch.Tensor, ...] = tensor.split(sizes)
    return parts
