"""The processes of a run: who this one is, the groups it joins, and its random numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mt_megatron.backends.base import Backend
from mt_megatron.backends.distributed.namespace import let_group_threads_rest, prepare_environment
from mt_megatron.backends.dtypes import has_float64
from mt_megatron.backends.host_process import keep_freed_memory, set_threads
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import BackendError, ConfigError
from mt_megatron.parallel import rank_layout
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout
from mt_megatron.seams import collectives, widened
from mt_megatron.seams import transport as seam

if TYPE_CHECKING:
    from mt_megatron.pipeline.choice import ScheduleChoice


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
        return self.at.pp == (0 if self.layout.v else self.layout.pp - 1)

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts: one tensor-parallel rank of the last stage does, for the
        tokens it holds."""
        return self.is_last_stage and self.at.tp == 0

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Element-wise sum of ``values`` over all ranks, in float64; every rank must call it."""
        device = self.backend.device(self.backend.current_device())
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


def world_size() -> int:
    """Processes in the run: torchrun's ``WORLD_SIZE``, or 1 when it was started alone."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(config: TrainingConfig, backend: Backend) -> Iterator[Job]:
    """Join the run's process groups, seed, and leave them again.

    Within it steps run by the configuration's pipeline schedule, over its transport between stages.
    Uses torch's default process group if there is one. Otherwise makes it from torchrun's
    variables, or, when there are none, for this process alone and without opening a socket.
    Raises ``ConfigError`` when the number of processes does not fit the parallel sizes, and on all ranks when
    the transport cannot be used.
    """
    if backend.device_type == "cpu":
        set_threads(config.launch.cpu_threads)
        keep_freed_memory()
    parallel, choice = config.parallel, config.schedule_choice
    layout = RankLayout(
        world_size=world_size(),
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        vpp=config.virtual_pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        v=choice is not None and choice.is_v,
    )
    timeout = timedelta(minutes=config.launch.distributed_timeout_minutes)
    alone = not dist.is_initialized() and "RANK" not in os.environ
    if alone:
        _init_alone(backend, timeout)
    try:
        rank_layout.initialize(layout, backend, timeout)
        try:
            rank = dist.get_rank()
            job = Job(backend=backend, layout=layout, rank=rank, at=layout.coordinates(rank))
            seed_everything(config.train.seed, job)
            with (
                _scheduled(choice, layout),
                _sent_over(parallel.p2p_transport, layout.pp),
                widened.chosen(config.launch.cpu_bf16_products),
            ):
                yield job
        finally:
            rank_layout.destroy()
    finally:
        if alone and dist.is_initialized():
            let_group_threads_rest()
            dist.destroy_process_group()


@contextmanager
def _scheduled(choice: ScheduleChoice | None, layout: RankLayout) -> Iterator[None]:
    """Steps within it run as ``pipeline_schedule`` says; None: by Megatron-Core's own schedule."""
    source = None if choice is None else choice.source(layout.pp, layout.vpp or 1)
    if source is None:
        yield
        return
    from mt_megatron.pipeline.execute.source import set_pipeline_schedule

    set_pipeline_schedule(source)
    try:
        yield
    finally:
        set_pipeline_schedule(None)


@contextmanager
def _sent_over(transport: str, stages: int) -> Iterator[None]:
    """Transfers between stages within it go by ``p2p_transport``, on which all ranks agree first."""
    if transport == seam.COLLECTIVE and stages == 1:
        yield
        return
    from mt_megatron.comm.choice import choose

    choose(transport)
    try:
        seam.groups_made()
        yield
    finally:
        seam.close()
        choose(None)


def _init_alone(backend: Backend, timeout: timedelta) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise ConfigError(
            f"found WORLD_SIZE={os.environ['WORLD_SIZE']} without RANK; start the processes with torchrun, "
            "or unset WORLD_SIZE to run one"
        )
    prepare_environment(backend, nodes=1)
    backend.set_device(0)
    dist.init_process_group(backend.collective, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def seed_everything(seed: int, job: Job) -> None:
    """Seed Python, numpy, torch and Megatron's RNG tracker.

    As Megatron-LM does: pipeline stages differ (their layers must not start alike), data-parallel
    ranks do not (their copies must).
    """
    from megatron.core import tensor_parallel

    seed += 100 * job.at.pp
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def seed_dropout(seed: int, job: Job) -> None:
    """Let the ranks that hold other tokens of a sequence drop other activations; nothing without
    context parallelism. For when the model is built: they must have drawn the same weights."""
    from megatron.core import tensor_parallel

    if job.layout.cp > 1:
        seed += 100 * job.at.pp + 100_003 * job.at.cp
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def require_precision(config: TrainingConfig, backend: Backend) -> None:
    """Raise ``BackendError`` when the device cannot do the configured precision."""
    device = backend.device_name(backend.current_device())
    if config.train.bf16 and not backend.bf16_supported():
        raise BackendError(
            f"found --bf16 and {device}, which has no bf16 arithmetic; leave --bf16 out to train in fp32"
        )
    if config.model.moe_router_dtype == "fp64" and not has_float64(backend.device(backend.current_device())):
        raise BackendError(
            f"found moe_router_dtype fp64 and {device}, which has no float64 arithmetic; "
            "expected fp32, or none for the model's own type. Change moe_router_dtype"
        )
