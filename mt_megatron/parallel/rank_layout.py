"""Which rank does what: coordinates and groups computed from sizes, without a process group.

The order is Megatron-Core's default ``tp-cp-ep-dp-pp`` (``parallel_state.RankGenerator``): tensor
parallel neighbours have adjacent ranks, pipeline neighbours are the farthest apart, and expert
parallel ranks are carved out of the data parallel ones.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mt_megatron.backends.base import Backend
from mt_megatron.backends.distributed.namespace import (
    let_group_threads_rest,
    local_device,
    node_count,
    prepare_environment,
)
from mt_megatron.backends.distributed.rendezvous import elastic_group
from mt_megatron.errors import BackendError, ConfigError
from mt_megatron.parallel import stage_order

_AXES = ("tp", "cp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Position of one rank on every axis. ``dp`` is ``edp * ep_size + ep``."""

    tp: int
    cp: int
    ep: int
    edp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Sizes of a job's parallel axes. Raises ConfigError when they do not fit together."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    """Model chunks per pipeline stage; None and 1 both mean no interleaving."""
    cp: int = 1
    ep: int = 1
    v: bool = False
    """True where a token goes back through the pipeline's ranks with the second of two chunks, so that the
    first rank has the first and the last stage (``parallel.stage_order``)."""

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "cp", "ep"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} is {size!r}; expected a whole number of at least 1")
        if self.vpp is not None and (not isinstance(self.vpp, int) or self.vpp < 1):
            raise ConfigError(f"vpp is {self.vpp!r}; expected None or a whole number of at least 1")
        model = self.tp * self.cp * self.pp
        if self.world_size % model:
            raise ConfigError(
                f"{self.world_size} ranks cannot be divided by tensor {self.tp} x context {self.cp} x "
                f"pipeline {self.pp} = {model}; start a multiple of {model} processes or change a size"
            )
        if self.dp % self.ep:
            raise ConfigError(
                f"expert parallel size {self.ep} does not divide the data parallel size {self.dp} "
                f"({self.world_size} ranks / {model}); expert ranks are taken from the data parallel ones"
            )
        if self.interleaved and self.pp == 1:
            raise ConfigError(
                f"vpp is {self.vpp} with one pipeline stage; interleaving needs pp of at least 2"
            )
        if self.v and self.vpp != 2:
            raise ConfigError(f"vpp is {self.vpp} with stages in a V; expected 2 chunks per rank")

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data parallel size of the expert parameters."""
        return self.dp // self.ep

    @property
    def interleaved(self) -> bool:
        """Whether a stage holds more than one model chunk."""
        return self.vpp is not None and self.vpp > 1

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` is. Raises ConfigError when it is not one of ``world_size``."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not in 0..{self.world_size - 1}")
        left, at = rank, {}
        for axis in _AXES:
            left, at[axis] = divmod(left, getattr(self, axis))
        return Coordinates(dp=at["edp"] * self.ep + at["ep"], **at)

    def groups(self, kind: str) -> list[list[int]]:
        """All groups of ranks that differ only on the axes named by ``kind``, joined with ``-``.

        Axes: ``tp``, ``cp``, ``dp``, ``pp``, ``ep`` (expert), ``edp`` (data parallel of experts);
        ``tp-pp`` is Megatron's model parallel group, ``dp-cp`` its data parallel group with context
        parallelism, ``tp-ep-pp`` and ``edp`` those of the expert parameters. Also ``embedding``
        (ranks of the first and the last stage of each pipeline) and ``position-embedding`` (first stage).
        Groups and their ranks ascend.
        """
        if kind == "embedding":
            return [sorted({group[0], group[0 if self.v else -1]}) for group in self.groups("pp")]
        if kind == "position-embedding":
            return [group[:1] for group in self.groups("pp")]
        named = set(kind.split("-"))
        if named - {*_AXES, "dp"} or ("dp" in named and named & {"ep", "edp"}):
            raise ConfigError(
                f"unknown kind of group {kind!r}; expected embedding, position-embedding, or axes joined "
                "with '-' out of tp, cp, pp and either dp or its parts ep and edp"
            )
        if "dp" in named:
            named |= {"ep", "edp"}
        fixed = [axis for axis in _AXES if axis not in named]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            found.setdefault(tuple(getattr(at, axis) for axis in fixed), []).append(rank)
        return list(found.values())


def rank_of_world() -> tuple[int, int]:
    """This process's rank and how many there are; 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def layout_of_groups() -> RankLayout:
    """Sizes of the groups that Megatron-Core has, whoever made them; without groups everything is
    data-parallel. Raises ConfigError for sizes that no layout has, such as an encoder's of its own."""
    state, (_, world_size) = _state(), rank_of_world()
    if state is None:
        return RankLayout(world_size=world_size)
    layout = RankLayout(
        world_size=world_size,
        tp=state.get_tensor_model_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        vpp=state.get_virtual_pipeline_model_parallel_world_size(),
        cp=state.get_context_parallel_world_size(),
        ep=state.get_expert_model_parallel_world_size(),
    )
    if (dp := state.get_data_parallel_world_size()) != layout.dp:
        raise ConfigError(
            f"found {dp} data-parallel ranks, expected {layout.dp}: {world_size} ranks divided by tensor "
            f"{layout.tp} x context {layout.cp} x pipeline {layout.pp}. Give an encoder the decoder's sizes"
        )
    return layout


def place_in_groups() -> Coordinates | None:
    """This rank's place in the groups that Megatron-Core has, whatever their order; None without groups."""
    state = _state()
    if state is None:
        return None
    ep, dp = state.get_expert_model_parallel_rank(), state.get_data_parallel_rank()
    return Coordinates(
        tp=state.get_tensor_model_parallel_rank(),
        cp=state.get_context_parallel_rank(),
        ep=ep,
        edp=dp // state.get_expert_model_parallel_world_size(),
        dp=dp,
        pp=state.get_pipeline_model_parallel_rank(),
    )


def _state() -> Any:
    # Not imported here: a program that does not use it has no groups of it either.
    state: Any = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


_made_default_group = False


def initialize(layout: RankLayout, backend: Backend, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Make Megatron-Core's process groups for ``layout`` on ``backend``.

    Uses torch's default process group, or makes it from torchrun's variables. Raises ConfigError
    when the job has another number of processes than the layout, or when groups exist already.
    """
    global _made_default_group
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        raise ConfigError("the model parallel groups exist already; call destroy() before making others")
    if not dist.is_initialized():
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        _require_world(launched, layout)
        prepare_environment(backend, nodes=node_count())
        backend.set_device(local_device(backend))
        with _connecting():
            dist.init_process_group(backend.collective, timeout=timeout, **elastic_group(timeout))
        _made_default_group = True
    _require_world(dist.get_world_size(), layout)
    stage_order.use_v(layout.v)
    with _connecting():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.interleaved else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            distributed_timeout_minutes=math.ceil(timeout / timedelta(minutes=1)),
        )


@contextmanager
def _connecting() -> Iterator[None]:
    """Name the likely cause where torch cannot connect the ranks: its own error names an address alone."""
    try:
        yield
    except RuntimeError as error:  # DistError is one
        if "EADDRINUSE" in str(error) or not (isinstance(error, dist.DistError) or "Gloo" in str(error)):
            raise
        raise BackendError(
            f"rank {os.environ.get('RANK', '0')} could not connect to the other ranks "
            f"({' '.join(str(error).split())}): a rank that ended before, here or on another node, says why "
            "in its own output; see that first"
        ) from error


def destroy() -> None:
    """Undo ``initialize``: end Megatron-Core's groups, and the default group if it was made there."""
    global _made_default_group
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    stage_order.use_v(False)
    if _made_default_group and dist.is_initialized():
        let_group_threads_rest()
        dist.destroy_process_group()
    _made_default_group = False


def _require_world(found: int, layout: RankLayout) -> None:
    if found != layout.world_size:
        raise ConfigError(
            f"the job has {found} process(es) and the layout wants {layout.world_size}; "
            f"start {layout.world_size} processes or change the parallel sizes"
        )
