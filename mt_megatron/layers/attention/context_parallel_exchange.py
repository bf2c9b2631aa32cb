"""How keys and values reach the ranks of a context-parallel group, and their gradients come back.

``all_gather``: one collective brings everybody's, one reduce-scatter sends the gradients home. What
is gathered lives only as long as the call: the backward pass gathers it again.
``p2p``: shards travel round a ring (arXiv:2310.01889) while the one at hand is worked on, and in the
backward pass the sums of their gradients travel after them. A rank holds two shards at a time.

A shard is [2, tokens of a rank, batch, groups, head size]: keys, then values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mt_megatron.seams import collectives, events

# torch renamed these twice; the newest name is the one that does not warn.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Gradient = Callable[[int, Tensor], Tensor]
"""Rank and shard -> gradient of that shard, in the dtype it is to be summed in."""


class Exchange(Protocol):
    """What ``EXCHANGES`` holds. Every rank of the group must make the same calls in the same order."""

    def shards(self, own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
        """Every rank of ``group`` and its shard, the own one first, then those of the ranks before."""

    def gradient(self, own: Tensor, group: dist.ProcessGroup, of: Gradient) -> Tensor:
        """The sum over ``group`` of what each rank's ``of`` gives for the own shard; asked for in the
        order of ``shards``."""


class AllGather:
    """One all-gather forward; one all-gather and one reduce-scatter backward."""

    def shards(self, own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        gathered = own.new_empty(size * own.size(0), *own.shape[1:])
        with collectives.announced("all_gather", "cp", group, own):
            _all_gather(gathered, own, group=group)
        for step in range(size):
            source = (rank - step) % size
            yield source, gathered.unflatten(0, (size, -1))[source]

    def gradient(self, own: Tensor, group: dist.ProcessGroup, of: Gradient) -> Tensor:
        total: Tensor | None = None
        for source, shard in self.shards(own, group):
            part = of(source, shard)
            if total is None:
                total = part.new_empty(dist.get_world_size(group), *own.shape)
            total[source] = part
        assert total is not None
        mine = total.new_empty(own.shape)
        with collectives.announced("reduce_scatter", "cp", group, total):
            _reduce_scatter(mine, total.flatten(0, 1), group=group)
        return mine


class Ring:
    """Point-to-point transfers to the next rank of the group that overlap with the work."""

    def shards(self, own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for step in range(size):
            transfer = _Transfer(own, group) if step < size - 1 else None
            yield (rank - step) % size, own
            if transfer is not None:
                own = transfer.received()

    def gradient(self, own: Tensor, group: dist.ProcessGroup, of: Gradient) -> Tensor:
        sums: _Transfer | None = None
        for source, shard in self.shards(own, group):
            part = of(source, shard)
            if sums is not None:
                part += sums.received()
            # The next rank has this shard next; after the last step the sum arrives where it belongs.
            sums = _Transfer(part, group)
        assert sums is not None
        return sums.received()


class _Transfer:
    """A tensor on its way to the next rank of the ring, and one of its shape from the rank before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        # Both are kept until the transfer is over.
        self._sent, self._received = tensor, torch.empty_like(tensor)
        following = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self._attrs: dict[str, Any] | None = None
        if events.listening():
            self._attrs = collectives.described("ring", "cp", group, collectives.size_of(tensor))
            self._attrs["peer"] = before
        with collectives.part(self._attrs, "start"):
            self._works: list[Any] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._sent, following, group),
                    dist.P2POp(dist.irecv, self._received, before, group),
                ]
            )

    def received(self) -> Tensor:
        with collectives.part(self._attrs, "wait"):
            for work in self._works:
                work.wait()
        return self._received


EXCHANGES: dict[str, Exchange] = {"all_gather": AllGather(), "p2p": Ring()}
"""By Megatron-Core's later name for the choice, ``cp_comm_type``."""
