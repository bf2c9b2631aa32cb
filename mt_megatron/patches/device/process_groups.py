"""Megatron's process groups: one for equal ranks where a group costs threads, and freed when destroyed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.backends.distributed.namespace import let_group_threads_rest, shared_groups
from mt_megatron.patches.device.pending_transfers import end_transfers
from mt_megatron.patching.spec import Patch
from mt_megatron.seams import transport


def _initialize_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with shared_groups():
        original(*args, **kwargs)


def _destroy_model_parallel(original: Callable[[], None]) -> None:
    """Upstream forgets most groups without destroying them, and with Gloo each keeps two threads
    and a mesh of sockets until the process ends."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    end_transfers()
    held = _groups_of(parallel_state)
    original()
    # Left standing, a rank of the next layout takes itself for a member of this one's groups and stages.
    for name in vars(parallel_state):
        if name.endswith(("_GLOBAL_RANKS", "_DECODER_START", "_SPLIT_RANK")):
            setattr(parallel_state, name, None)
    if not dist.is_initialized():
        return
    registered = dist.distributed_c10d._world.pg_map
    for name, groups in held.items():
        setattr(parallel_state, name, None)
        for group in groups:
            # Two names can hold one group, upstream destroys some itself, and the default group is
            # the caller's.
            if group in registered and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    let_group_threads_rest()
    held.clear()
    gc.collect()


def _groups_of(parallel_state: Any) -> dict[str, list[Any]]:
    """Groups that Megatron's names hold. One name has several on ranks of an encoder whose tensor parallelism
    is smaller than the decoder's: they are in several pipelines."""
    import torch.distributed as dist

    several = {
        name: value if isinstance(value, list) else [value] for name, value in vars(parallel_state).items()
    }
    return {
        name: groups
        for name, groups in several.items()
        if groups and all(isinstance(each, dist.ProcessGroup) for each in groups)
    }


def end_groups() -> None:
    """End every process group of torch and let go of Megatron's, which ends those over Gloo: each has two
    threads, and one that drops the last tensor it worked on when the interpreter has begun to end aborts the
    process. A transport between their ranks ends before. Nothing happens where there are none."""
    transport.close()
    dist, parallel_state = map(sys.modules.get, ("torch.distributed", "megatron.core.parallel_state"))
    if dist is None or not dist.is_available():
        return
    end_transfers()
    let_group_threads_rest()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in _groups_of(parallel_state) if parallel_state is not None else ():
        setattr(parallel_state, name, None)
    gc.collect()


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="groups.initialize_model_parallel",
            target="megatron.core.parallel_state:initialize_model_parallel",
            kind="wrap",
            feature="collectives",
            reason="it makes 18 groups a rank, most of them of the same ranks, and with Gloo each has two "
            "threads and its own sockets",
            body=_initialize_model_parallel,
            digest="35db5de0f1a2cad23ad9ae97e8c4b8f6acc2c6c8d34316a038493d626f1773e1",
        ),
        Patch(
            id="groups.destroy_model_parallel",
            target="megatron.core.parallel_state:destroy_model_parallel",
            kind="wrap",
            feature="collectives",
            reason="0.9.0 drops its references and leaks every group's threads and sockets",
            body=_destroy_model_parallel,
            digest="2e17a04aa396c4f23415e19ad10a3f6ac5a2d4b855c40dce8bb565e841395bd4",
        ),
    ]
