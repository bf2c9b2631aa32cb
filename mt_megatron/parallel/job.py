"""This process within a run: its backend, its rank, its position on every parallel axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mt_megatron.backends.base import Backend
from mt_megatron.backends.wide import has_float64
from mt_megatron.seams import collectives
from mt_megatron.seams.layout import Coordinates, RankLayout


@dataclass(frozen=True, kw_only=True)
class Job:
    """This process within the run."""

    backend: Backend
    layout: RankLayout
    rank: int
    at: Coordinates
    """Position of ``rank`` on every axis."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that reports and writes small files."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.at.pp == self.layout.pp - 1

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts: one tensor-parallel rank of the last stage does, for the
        tokens it holds."""
        return self.is_last_stage and self.at.tp == 0

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Element-wise sum of ``values`` over all ranks, in float64; every rank must call it."""
        device = self.backend.device()
        own = torch.tensor(values, dtype=torch.float64)
        if has_float64(device):
            total = own.to(device)
            with collectives.announced("all_reduce", "world", None, total):
                dist.all_reduce(total)
        else:
            # The bytes of all ranks' numbers come here, and the host adds them up in the ranks' order.
            given = own.view(torch.uint8).to(device)
            every = [torch.empty_like(given) for _ in range(dist.get_world_size())]
            with collectives.announced("all_gather", "world", None, given):
                dist.all_gather(every, given)
            total = torch.stack(every).cpu().view(torch.float64).sum(dim=0)
        summed: list[float] = total.tolist()
        return summed

    def agree(self, failure: BaseException | None) -> str | None:
        """Rank 0 says whether its part of a collective action failed, so that nobody waits for a
        rank that has left. Returns its error as text on every rank, None when it succeeded."""
        said: list[str | None] = [None if failure is None else f"{type(failure).__name__}: {failure}"]
        with collectives.announced("broadcast_object", "world", None):
            dist.broadcast_object_list(said, src=0)
        return said[0]
