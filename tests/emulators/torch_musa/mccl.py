"""Process groups of the backend name ``mccl``: Gloo over the host memory under the device's tensors."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import refusals
from .storage import host_view

_Future = Any


class _Works(dist._Work):
    """Several pieces of Gloo's work as one, and what has to be done after them."""

    def __init__(self, works: list[Any], then: Any = None, result: Any = None) -> None:
        super().__init__()
        self._works, self._then, self._result = works, then, result

    def wait(self, timeout: timedelta | None = None) -> bool:
        while self._works:
            self._works.pop(0).wait()
        if self._then is not None:
            self._then()
            self._then = None
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class EmulatedMccl(dist.ProcessGroup):
    """Takes tensors on ``musa`` only, as MCCL does, and on the host where the group was made for both
    (``cpu:gloo,musa:mccl``)."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, *, host_too: bool) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._host_too = host_too
        # torch asks the group which devices it serves, for example to place pickled objects.
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in ("musa", "cpu") if host_too else ("musa",):
            self._register_backend(torch.device(device), kind, self._gloo)

    def getBackendName(self) -> str:
        return "mccl"

    def _host(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._host(each) for each in value]
        if value.device.type == "musa":
            return host_view(value)
        if self._host_too:
            return value
        raise RuntimeError(
            f"No backend type associated with device type {value.device.type} (the group is mccl's)"
        )

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        options = c10d.AllreduceOptions() if opts is None else opts
        average = options.reduceOp == dist.ReduceOp.AVG
        if average:
            options.reduceOp = dist.ReduceOp.SUM
        host = self._host(tensors)
        work = self._gloo.allreduce(host, options)
        return _Works([work], self._average(host) if average else None, list(tensors))

    def _average(self, tensors: list[torch.Tensor]) -> Any:
        def divide() -> None:
            for tensor in tensors:
                tensor.div_(self.size())

        return divide

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        single = c10d.AllreduceOptions()
        single.reduceOp = opts.reduceOp
        return _Works([self.allreduce([each], single) for each in tensors], None, list(tensors))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return _Works([self._gloo.broadcast(self._host(tensors), opts)], None, list(tensors))

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return _Works([self._gloo.reduce(self._host(tensors), opts)], None, list(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        refusals.unequal("all_gather", [inputs[0].numel(), *(part.numel() for part in outputs[0])])
        # As NCCL does: the number of elements decides.
        own = self._host(inputs[0]).reshape(-1)
        parts = [torch.empty_like(own) for _ in outputs[0]]
        work = self._gloo.allgather([parts], [own], c10d.AllgatherOptions())

        def back() -> None:
            for into, part in zip(self._host(outputs[0]), parts, strict=True):
                into.copy_(part.view(into.shape))

        return _Works([work], back, outputs)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        options = c10d.AllgatherOptions()
        flat = self._host(output).view(-1), self._host(input).view(-1)
        return _Works([self._gloo._allgather_base(*flat, options)], None, [output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return _Works(
            [self._allgather_base(o, i) for o, i in zip(outputs, inputs, strict=True)], None, outputs
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        refusals.unequal("reduce_scatter", [part.numel() for part in inputs[0]])
        work = self._gloo.reduce_scatter(self._host(outputs), self._host(inputs), opts)
        return _Works([work], None, outputs)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any) -> Any:
        average = opts.reduceOp == dist.ReduceOp.AVG
        options = c10d.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM if average else opts.reduceOp
        host = self._host(output).view(-1)
        # Gloo would sum into its input, which the caller may still need.
        work = self._gloo._reduce_scatter_base(host, self._host(input).view(-1).clone(), options)
        return _Works([work], self._average([host]) if average else None, [output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _Works([self._reduce_scatter_base(o, i, opts) for o, i in pairs], None, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        refusals.unequal("all_to_all_single", [*output_splits, *input_splits])
        options = c10d.AllToAllOptions()
        host = self._host(output), self._host(input)
        if not output_splits and not input_splits:
            host = host[0].view(-1), host[1].view(-1)
        return _Works([self._gloo.alltoall_base(*host, output_splits, input_splits, options)], None, [output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gloo has none: sends and receives."""
        refusals.unequal("all_to_all", [each.numel() for each in (*outputs, *inputs)])
        works = []
        for peer in range(self.size()):
            if peer == self.rank():
                outputs[peer].copy_(inputs[peer])
                continue
            works.append(self.send([inputs[peer].contiguous()], peer, self.rank()))
            works.append(self.recv([outputs[peer]], peer, peer))
        return _Works(works, None, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return _Works([self._gloo.gather(self._host(outputs), self._host(inputs), opts)], None, outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return _Works([self._gloo.scatter(self._host(outputs), self._host(inputs), opts)], None, outputs)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        host = self._host(tensors)
        work = _Works([self._gloo.send(host, destination, tag)], None, list(tensors))
        work.held = host  # Gloo reads it until the work is done
        return work

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        host = self._host(tensors)
        work = _Works([self._gloo.recv(host, source, tag)], None, list(tensors))
        work.held = host
        return work

    def barrier(self, opts: Any = None) -> Any:
        return _Works([self._gloo.barrier(c10d.BarrierOptions())])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> EmulatedMccl:
    # torch tells a creator nothing of the other half of "cpu:gloo,musa:mccl".
    config = sys._getframe(1).f_locals.get("backend_config")
    host_too = "cpu" in getattr(config, "device_backend_map", {})
    return EmulatedMccl(store, rank, size, timeout, host_too=host_too)


def register() -> None:
    """Make ``mccl`` a backend name of ``torch.distributed`` for the device."""
    dist.Backend.register_backend("mccl", _create, devices=["musa"])
