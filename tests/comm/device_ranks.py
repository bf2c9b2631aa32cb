"""Two ranks that exchange tensors of an emulated device; run by ``run_ranks``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.comm.errors import TransportError
from mt_megatron.comm.transport import Edge, Label, Owned


def exchange(streams: bool) -> dict[str, Any]:
    """``streams``: through side streams and events, as where host memory can be pinned (here it cannot: the
    memory is ordinary). Returns what arrived, and which calls of streams were made in which order."""
    from mt_megatron.backends import registry
    from mt_megatron.comm.bootstrap import default_bootstrap
    from mt_megatron.comm.shared_memory.ring import RingSize
    from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport

    backend, _ = registry.select("musa")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    transport = SharedMemoryTransport(
        default_bootstrap("device"),
        device=backend.device(backend.current_device()),
        backend=backend,
        size=RingSize(4096, 8),
        timeout=30.0,
        crc=True,
    )
    calls: list[str] = []
    if streams:
        _with_streams(transport._staging, calls)
    there, back = Edge(rank, 1 - rank, 0), Edge(1 - rank, rank, 0)
    transport.prepare([there, back])
    device = backend.device(backend.current_device())
    values = torch.arange(30_000, dtype=torch.float32).view(100, 300)
    sent = [
        (values + rank).to(device).bfloat16(),
        (values * 2).to(device).t(),
        torch.ones(0, 3, device=device),
    ]
    handles = [transport.post_send(there, each, label=Label(index)) for index, each in enumerate(sent)]
    sent[0].data = torch.empty((1,), device=device, dtype=torch.bfloat16)
    receives = [
        transport.post_recv(back, shape, dtype)
        for shape, dtype in (
            ((100, 300), torch.bfloat16),
            ((300, 100), torch.float32),
            ((0, 3), torch.float32),
        )
    ]
    out = torch.empty((4,), device=device)
    last = transport.post_recv(back, (4,), torch.float32, out=out)
    handles.append(transport.post_send(there, torch.full((4,), 9.0, device=device)))
    got = [each.wait() for each in receives]
    lease = last.lease()
    with lease as tensor:
        in_out = tensor is out and bool((out.cpu() == 9).all())
    for each in handles:
        each.wait()
    transport.finish()
    found = {
        "devices": sorted({each.device.type for each in got}),
        "equal": [
            torch.equal(got[0].cpu(), (values + 1 - rank).bfloat16()),
            torch.equal(got[1].cpu(), (values * 2).t()),
            got[2].shape == (0, 3),
            in_out,
            isinstance(lease, Owned),
        ],
        "calls": list(calls),
        "own stream": transport._staging._outwards is not transport._staging._inwards,
    }
    if streams:
        found["written"] = _written(transport, there, back)
    dist.barrier()
    transport.close()
    return found


def _written(transport: Any, there: Edge, back: Edge) -> str:
    """The error of a write to a tensor of the device behind its post, before its handle was waited for."""
    tensor = torch.zeros(20_000, device=transport._device)
    handle = transport.post_send(there, tensor)
    tensor.add_(1.0)
    dist.barrier()
    transport.post_recv(back, (20_000,), torch.float32).wait()
    try:
        handle.wait()
    except TransportError as error:
        return str(error)
    return ""


def _with_streams(staging: Any, calls: list[str]) -> None:
    """Make ``staging`` take the way of pinned memory, with ordinary memory, and note its stream calls."""
    staging._pins = True
    staging.host_memory = lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype)
    made = staging._backend.new_stream

    def new_stream() -> Any:
        stream = made()
        original = stream.wait_stream

        def wait_stream(other: Any) -> None:
            calls.append("the side stream waits for the current one")
            original(other)

        stream.wait_stream = wait_stream
        return stream

    class Backend:
        def __getattr__(self, name: str) -> Any:
            return getattr(made.__self__, name)

        @staticmethod
        def new_stream() -> Any:
            return new_stream()

    staging._backend = Backend()
