"""What Megatron's modules see as ``torch.distributed`` when the device's library is not NCCL."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.backends.base import Backend
from mt_megatron.backends.torch_version import torch_is_before
from mt_megatron.backends.translate import DeviceTranslator
from mt_megatron.errors import BackendError

# The names that Megatron-Core 0.9.0 calls were renamed twice; the current ones do the same without a warning.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# Collectives of one buffer, with NCCL's rules for shapes: the number of elements decides, not the shape.
# Gloo compares shapes: it refuses a matrix that is gathered into a flat buffer, and ``reduce_scatter`` of
# torch 2.13 ends the process. So both buffers are passed as one dimension. MCCL gets the same.


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


# Collectives of a list whose parts differ in size, which NCCL takes and other libraries refuse. Gloo
# gathers equal shapes only, and Gloo of torch before 2.13 has no ``reduce_scatter`` of a list. MCCL is
# reported to want equal sizes everywhere.


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


logger = logging.getLogger("mt_megatron")

# The namespace.

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


def node_count() -> int:
    """Nodes of this job, by torchrun's variables (unset: a lone process). Where a launcher of another kind
    tells no ``LOCAL_WORLD_SIZE``: 1 if the ranks meet on loopback, else 2 for several."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is not None:
        return max(1, math.ceil(world / int(local)))
    meeting_point = os.environ.get("MASTER_ADDR", "localhost")
    return 1 if world == 1 or meeting_point == "localhost" or meeting_point.startswith("127.") else 2


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


_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
)
"""Variables with a process's number on its node: torchrun's, then those of other launchers."""


def _local_rank(backend: Backend) -> int:
    own, *others = _LOCAL_RANKS
    if os.environ.get(own):
        return int(os.environ[own])
    # Alone in a job, a process may still be one of many that a launcher started.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or backend.device_count() <= 1:
        return 0
    # Before a launcher's: one that started a single task which starts the ranks tells them all 0.
    if node_count() == 1:
        return int(os.environ.get("RANK", "0"))
    for name in others:
        if os.environ.get(name):
            # More tasks than devices are visible: each task sees devices of its own.
            return int(os.environ[name]) % backend.device_count()
    raise BackendError(
        f"found WORLD_SIZE={os.environ['WORLD_SIZE']}, {backend.device_count()} {backend.name} devices and "
        f"no number of this process on its node; expected one of {', '.join(_LOCAL_RANKS)}: without it all "
        "processes of a node would take device 0. Start them with torchrun, or set LOCAL_RANK and "
        "LOCAL_WORLD_SIZE"
    )


def local_device(backend: Backend) -> int:
    """Index of this process's device: its local rank, or 0 where the launcher shows each process one
    device of its own (by ``<NAME>_VISIBLE_DEVICES``). Raises BackendError when it has none, or when nothing
    says which."""
    rank, count = _local_rank(backend), backend.device_count()
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
    """Within it, groups of equal ranks over Gloo are one group, as seen from Megatron's modules; it ends
    when all ranks have connected them.

    Each Gloo group keeps two threads and a mesh of sockets, and most of Megatron's groups have the
    ranks of another one. All ranks ask for the same groups in the same order, so they agree on what
    is made. Libraries whose groups are streams of their own are left alone.
    """
    global _shared
    outer, _shared = _shared, {}
    try:
        yield
        if any(len(ranks) > 1 for ranks, _ in _shared):
            _wait_until_all_are_connected()
    finally:
        _shared = outer


def _wait_until_all_are_connected() -> None:
    """Collective over all ranks, through the store: it works for every library and launches no collective.

    A rank can be done with connecting a Gloo group while a peer still waits for its own thread to see the
    connection. If the first rank ends the group in that moment, the peer's constructor fails with
    "connectFullMesh failed ... Connection closed by peer", although no process is lost.
    """
    c10d: Any = dist.distributed_c10d  # its annotations differ between releases of torch
    store = c10d._get_default_store()
    c10d._store_based_barrier(
        dist.get_rank(),
        store,
        # Unique within the store: torch counts the groups that it made, equally on all ranks.
        f"mt_megatron/connected/{c10d._world.group_count}",
        dist.get_world_size(),
        store.timeout,
    )


def distributed_overrides(backend: Backend) -> dict[str, Any]:
    """Overrides below ``torch.distributed`` that turn NCCL requests into ``backend``'s library."""
    translator = DeviceTranslator(backend)

    def library(requested: Any) -> Any:
        return backend.process_group_backend(requested)

    @functools.wraps(dist.init_process_group)
    def init_process_group(backend_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        backend_name = kwargs.pop("backend", backend_name)
        prepare_environment(backend, nodes=node_count())
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
