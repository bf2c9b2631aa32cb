"""What Megatron's modules see as ``torch.distributed`` when the device's library is not NCCL."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from mt_megatron.backends.base import Backend
from mt_megatron.backends.distributed.flat_collectives import (
    all_gather_flat,
    all_to_all_flat,
    reduce_scatter_flat,
)
from mt_megatron.backends.distributed.uneven_collectives import (
    all_gather_of_any_sizes,
    all_to_all_of_any_sizes,
    reduce_scatter_by_reduces,
    reduce_scatter_of_any_sizes,
)
from mt_megatron.backends.torch_version import torch_is_before
from mt_megatron.backends.translate import DeviceTranslator
from mt_megatron.errors import BackendError

logger = logging.getLogger("mt_megatron")

_ACCELERATOR_LIBRARIES = ("nccl", "mccl")


def translate_process_group_backend(
    requested: str | None, *, collective: str, device_type: str
) -> str | None:
    """Map a ``torch.distributed`` backend string onto ``collective`` of ``device_type``.

    ``nccl`` -> ``gloo``; ``cpu:gloo,cuda:nccl`` -> ``cpu:gloo`` on cpu and ``cpu:gloo,musa:mccl``
    on musa; everything else (``gloo``, ``mpi``, ``fake``) is what the caller chose and stays.
    """
    if requested is None:
        return None
    text = str(requested).lower()
    if ":" not in text:
        return collective if text in _ACCELERATOR_LIBRARIES else requested
    pairs: dict[str, str] = {}
    for part in text.split(","):
        device, _, library = part.strip().partition(":")
        device = device_type if device == "cuda" else device
        library = collective if library in _ACCELERATOR_LIBRARIES else library
        pairs.setdefault(device, library)
    return ",".join(f"{device}:{library}" for device, library in pairs.items())


class NcclOptions:
    """Takes the place of ``ProcessGroupNCCL.Options``: accepts what is set on it, is never used."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


@functools.cache
def _say_options_ignored(collective: str) -> None:
    logger.warning(
        "NCCL communicator options were given; %s has none of them, so they are ignored", collective
    )


def _drop_nccl_options(kwargs: dict[str, Any], collective: str) -> None:
    options = kwargs.get("pg_options")
    if isinstance(options, NcclOptions) or type(options).__module__.endswith("ProcessGroupNCCL"):
        _say_options_ignored(collective)
        kwargs["pg_options"] = None


def single_node() -> bool:
    """Whether every rank of this job runs here, by torchrun's variables (unset: a lone process)."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return world <= int(os.environ.get("LOCAL_WORLD_SIZE", world))


_SET_BY_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)
_VARIABLES = {"nccl": ("NCCL_", "TORCH_NCCL_"), "mccl": ("MCCL_",)}


def prepare_environment(backend: Backend, *, nodes: int) -> None:
    """Set what ``backend``'s collective library needs, where the user has not, and take the settings
    of another vendor's library out of this process: the two share code and would read each other's."""
    for name, value in backend.collective_environment(nodes).items():
        os.environ.setdefault(name, value)
    if backend.collective not in _VARIABLES:
        return
    foreign = tuple(p for library, own in _VARIABLES.items() if library != backend.collective for p in own)
    dropped = sorted(name for name in os.environ if name.startswith(foreign))
    for name in dropped:
        del os.environ[name]
    named = [name for name in dropped if name not in _SET_BY_TORCHRUN]
    if named:
        logger.warning(
            "found settings of another library than %s, taken out of this process: %s; use its own variables",
            backend.collective,
            ", ".join(named),
        )


def local_device(backend: Backend) -> int:
    """Index of this process's device: its local rank, or 0 where the launcher shows each process one
    device of its own (by ``<NAME>_VISIBLE_DEVICES``). Raises BackendError when it has none."""
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), backend.device_count()
    if rank < count:
        return rank
    variable = f"{backend.name.upper()}_VISIBLE_DEVICES"
    if count == 1 and variable in os.environ:
        return 0
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "more")
    raise BackendError(
        f"found {count} {backend.name} device(s) and {ranks} processes on this node: local rank {rank} has "
        f"none; start fewer processes per node, or make more devices visible ({variable})"
    )


def let_group_threads_rest() -> None:
    """Call before process groups end. In torch before 2.13 the end of a Gloo group waits for the group's
    threads without letting go of the interpreter, which a thread may need to drop the last tensor
    that it worked on: let them do it first, or both wait for ever."""
    if torch_is_before(2, 13):
        time.sleep(0.1)


_shared: dict[Any, Any] | None = None


@contextmanager
def shared_groups() -> Iterator[None]:
    """Within it, groups of equal ranks over Gloo are one group, as seen from Megatron's modules.

    Each Gloo group keeps two threads and a mesh of sockets, and most of Megatron's groups have the
    ranks of another one. All ranks ask for the same groups in the same order, so they agree on what
    is made. Libraries whose groups are streams of their own are left alone.
    """
    global _shared
    outer, _shared = _shared, {}
    try:
        yield
    finally:
        _shared = outer


def distributed_overrides(backend: Backend) -> dict[str, Any]:
    """Overrides below ``torch.distributed`` that turn NCCL requests into ``backend``'s library."""
    translator = DeviceTranslator(backend)

    def library(requested: Any) -> Any:
        return backend.process_group_backend(requested)

    @functools.wraps(dist.init_process_group)
    def init_process_group(backend_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        backend_name = kwargs.pop("backend", backend_name)
        prepare_environment(backend, nodes=1 if single_node() else 2)
        _drop_nccl_options(kwargs, backend.collective)
        device_id = kwargs.pop("device_id", None)
        if device_id is not None and backend.device_type != "cpu":
            kwargs["device_id"] = translator.device(device_id)
        # Left to itself torch picks by the accelerator that it sees, which is not the one in use.
        dist.init_process_group(library(backend_name) or backend.collective, *args, **kwargs)

    @functools.wraps(dist.new_group)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        _drop_nccl_options(kwargs, translator.backend.collective)
        if args and isinstance(args[0], NcclOptions):
            _say_options_ignored(translator.backend.collective)
            args = (None, *args[1:])
        if kwargs.get("device_id") is not None:
            kwargs["device_id"] = translator.device(kwargs["device_id"])
            if translator.backend.device_type == "cpu":
                del kwargs["device_id"]
        apart = _shared is None or ranks is None or any(args)
        if apart or (library(backend) or dist.get_backend()) != "gloo":
            return dist.new_group(ranks, timeout, library(backend), *args, **kwargs)
        assert _shared is not None
        key = (tuple(ranks), timeout)
        if key not in _shared:
            _shared[key] = dist.new_group(ranks, timeout, library(backend), *args, **kwargs)
        return _shared[key]

    @functools.wraps(dist.barrier)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        # Device ids choose a CUDA device for NCCL's barrier; other libraries refuse or ignore them.
        return dist.barrier(group=group, async_op=async_op)

    overrides: dict[str, Any] = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "barrier": barrier,
        "_all_gather_base": all_gather_flat,
        "all_gather_into_tensor": all_gather_flat,
        "_reduce_scatter_base": reduce_scatter_flat,
        "reduce_scatter_tensor": reduce_scatter_flat,
        "ProcessGroupNCCL": SimpleNamespace(Options=NcclOptions),
    }
    if backend.collective == "gloo":
        overrides["all_gather"] = all_gather_of_any_sizes
        overrides["all_to_all_single"] = all_to_all_flat
        if torch_is_before(2, 13):
            overrides["reduce_scatter"] = reduce_scatter_by_reduces
    elif backend.collective == "mccl":
        overrides["all_gather"] = all_gather_of_any_sizes
        overrides["all_to_all_single"] = all_to_all_of_any_sizes
        overrides["reduce_scatter"] = reduce_scatter_of_any_sizes
    make_mesh = getattr(dist, "init_device_mesh", None)
    if make_mesh is not None:

        @functools.wraps(make_mesh)
        def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
            return make_mesh(translator.device_type(device_type), *args, **kwargs)

        overrides["init_device_mesh"] = init_device_mesh
    return overrides
