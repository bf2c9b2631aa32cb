"""Every collective that Megatron uses, on all ranks, against what the ranks' numbers must give."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.backends.distributed.namespace import local_device, prepare_environment
from tests.device.result import checked

SIZE = 1000


def run() -> list[dict[str, Any]]:
    """One result per collective and dtype; the same on every rank unless a rank failed."""
    mt_megatron.patch(os.environ["MT_MEGATRON_TEST_BACKEND"])
    backend = mt_megatron.backend()
    prepare_environment(backend, nodes=1)
    backend.set_device(local_device(backend))
    dist.init_process_group(backend.collective)
    rank, world, device = dist.get_rank(), dist.get_world_size(), backend.device(backend.current_device())

    def mine(dtype: torch.dtype, of: int = rank, size: int = SIZE) -> torch.Tensor:
        # Small whole numbers: exact in bf16 whatever the order of a sum.
        return torch.full((size,), of + 1, dtype=dtype, device=device)

    def equal(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
        backend.synchronize()
        assert found.device.type == device.type and torch.equal(found.cpu(), expected.cpu()), (
            found[:4].tolist(),
            expected[:4].tolist(),
        )
        return {"ranks": world, "elements": found.numel()}

    def all_reduce(dtype: torch.dtype) -> dict[str, Any]:
        x = mine(dtype)
        dist.all_reduce(x)
        return equal(x, torch.full_like(x, world * (world + 1) / 2))

    def all_gather(dtype: torch.dtype) -> dict[str, Any]:
        out = torch.empty(SIZE * world, dtype=dtype, device=device)
        dist.all_gather_into_tensor(out, mine(dtype))
        return equal(out, torch.cat([mine(dtype, of) for of in range(world)]))

    def reduce_scatter(dtype: torch.dtype) -> dict[str, Any]:
        out = torch.empty(SIZE, dtype=dtype, device=device)
        parts = torch.cat([mine(dtype) * (part + 1) for part in range(world)])
        dist.reduce_scatter_tensor(out, parts)
        return equal(out, torch.full_like(out, (rank + 1) * world * (world + 1) / 2))

    def all_to_all_of_unequal_parts(dtype: torch.dtype) -> dict[str, Any]:
        sizes = [1 + (rank + to) % 3 for to in range(world)]
        received = [1 + (of + rank) % 3 for of in range(world)]
        out = torch.empty(sum(received), dtype=dtype, device=device)
        dist.all_to_all_single(out, mine(dtype, size=sum(sizes)), received, sizes)
        return equal(out, torch.cat([mine(dtype, of, size) for of, size in enumerate(received)]))

    def broadcast(dtype: torch.dtype) -> dict[str, Any]:
        x = mine(dtype)
        dist.broadcast(x, src=world - 1)
        return equal(x, mine(dtype, world - 1))

    def send_and_receive_in_a_ring(dtype: torch.dtype) -> dict[str, Any]:
        out = torch.empty(SIZE, dtype=dtype, device=device)
        ops = [
            dist.P2POp(dist.isend, mine(dtype), (rank + 1) % world),
            dist.P2POp(dist.irecv, out, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return equal(out, mine(dtype, (rank - 1) % world))

    every: list[Callable[[torch.dtype], dict[str, Any]]] = [
        all_reduce,
        all_gather,
        reduce_scatter,
        all_to_all_of_unequal_parts,
        broadcast,
        send_and_receive_in_a_ring,
    ]
    dtypes = [torch.float32, *([torch.bfloat16] if backend.bf16_supported() else [])]
    return [
        asdict(
            checked(
                "collectives",
                f"{collective.__name__} {str(dtype).removeprefix('torch.')} on {world} ranks",
                lambda c=collective, d=dtype: c(d),
            )
        )
        for collective in every
        for dtype in dtypes
    ]
