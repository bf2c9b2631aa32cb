"""One rank of a job that does not exist: fake CUDA tensors, fake collectives, all of Megatron's code.

``FakeTensorMode`` gives tensors of device ``cuda`` shapes, dtypes and devices but no data, and raises
when an operation mixes devices. What a CPU-only torch cannot even say about such tensors is put
right by ``OnCuda``; the process groups are torch's ``fake`` ones. Everything runs under ``no_grad``:
with gradients, autograd asks for CUDA's device guard, which a CPU-only torch ends the process for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fake_cuda.on_cuda import OnCuda, known_numbers
from tests.fake_cuda.stand_in import RecordingCuda, local_index, torchrun_environment


def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """``Module._apply`` as it is for real CUDA parameters, which keep their identity.

    For fake ones torch swaps tensors instead, which fails for parameters that anybody holds weakly.
    """
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        if parameter is not None:
            applied = fn(parameter)
            parameter.data = applied
            parameter.fake_device = applied.device  # type: ignore[attr-defined]
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else fn(buffer)
    return module


def _all_gather(real: Any) -> Any:
    """``real``, after which the output knows what every rank would have contributed: the same."""

    def gather(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        handle = real(output, input, *args, **kwargs)
        known = getattr(input, "known", None)
        if known is not None:
            with unset_fake_temporarily():
                output.known = known.flatten().repeat(output.numel() // known.numel()).reshape(output.shape)
        return handle

    return gather


def _all_gather_object(found: list[Any], own: Any, group: Any = None) -> None:
    """Every rank says the same; torch's own form reads sizes from tensors, and fake ones have no data."""
    found[:] = [own] * len(found)


# Collectives that torch has no fake form of: as for the others, nothing happens and it is done.
_more_collectives = torch.library.Library("c10d", "IMPL")
for _name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
    _more_collectives.impl(_name, lambda *args: FakeWork().boxed(), "Meta")


@contextlib.contextmanager
def fake_rank(rank: int, world: int, cuda: RecordingCuda) -> Iterator[OnCuda]:
    """Be ``rank`` of ``world``; ``cuda`` is installed already. Leaves no process group behind."""
    cuda.current = local_index(rank, cuda.devices)
    real_new_group = dist.new_group

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        # ``gloo`` groups beside the NCCL ones would look for their peers.
        return real_new_group(ranks, timeout, backend="fake", **kwargs)

    def host_rng_state() -> torch.Tensor:
        # Megatron compares it with itself: one byte whose value FakeTensorMode knows.
        return torch.tensor([0], dtype=torch.uint8)

    with (
        # Layers enable gradients for their residual sum even where the caller has disabled them.
        mock.patch.object(torch, "enable_grad", torch.no_grad),
        mock.patch.object(torch.nn.Module, "_apply", _apply),
        mock.patch.object(torch, "get_rng_state", host_rng_state),
        mock.patch.object(torch, "set_rng_state", lambda state: None),
        mock.patch.object(dist, "_all_gather_base", _all_gather(dist._all_gather_base)),
        mock.patch.object(dist, "all_gather_into_tensor", _all_gather(dist.all_gather_into_tensor)),
        mock.patch.object(dist, "all_gather_object", _all_gather_object),
        mock.patch.dict(os.environ, torchrun_environment(rank, world, cuda.devices)),
        mock.patch.object(dist, "new_group", new_group),
    ):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        try:
            with (
                torch.no_grad(),
                mode,
                OnCuda(cuda) as translated,
                mock.patch.object(FakeTensor, "tolist", lambda self: known_numbers(self).tolist()),
            ):
                yield translated
        finally:
            dist.destroy_process_group()
