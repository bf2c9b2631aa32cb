"""How fast this rank computes, copies and writes, and how fast a pair of ranks exchange: short measurements.

Nothing here compares or judges. Collective calls are marked; they use the default process group and the
device of the backend, so each library is measured through the path that training takes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import time
from pathlib import Path
from typing import Any

SMALL_BYTES = 64
LARGE_BYTES = 1 << 20


class Measures:
    """Measurements of one rank."""

    def __init__(self, backend: Any, *, size: int | None = None) -> None:
        """``backend`` is a ``mt_megatron.backends.base.Backend``; ``size`` the side of the matrices."""
        import torch

        self._torch = torch
        self._backend = backend
        self._host = backend.device_type == "cpu"
        side = size or (384 if self._host else 4096)
        dtype = torch.float32 if self._host or not backend.bf16_supported() else torch.bfloat16
        self._device = backend.device(backend.current_device())
        self._a = torch.ones(side, side, dtype=dtype, device=self._device)
        self._out = torch.empty_like(self._a)
        self.flops_per_product = 2.0 * side**3
        """Of one product; a multiply and an add count as two."""

    def products(self, count: int) -> float:
        """Seconds that ``count`` matrix products take."""
        self._backend.synchronize()
        began = time.perf_counter()
        with self._torch.no_grad():
            for _ in range(count):
                self._torch.mm(self._a, self._a, out=self._out)
        self._backend.synchronize()
        return time.perf_counter() - began

    def copy_bandwidth(self, nbytes: int = 1 << 26, repeats: int = 5) -> float:
        """Bytes read and written per second in copies within the device's memory, the median's."""
        source = self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._device)
        target = self._torch.empty_like(source)
        times = []
        for _ in range(repeats + 1):
            self._backend.synchronize()
            began = time.perf_counter()
            target.copy_(source)
            self._backend.synchronize()
            times.append(time.perf_counter() - began)
        return 2 * nbytes / statistics.median(times[1:])

    def barrier(self) -> None:
        """Collective: wait for all ranks."""
        import torch.distributed as dist

        one = self._torch.zeros(1, device=self._device)
        dist.all_reduce(one)
        self._backend.synchronize()

    def exchange(self, peer: int, *, first: bool, nbytes: int, repeats: int) -> list[float]:
        """Seconds of each of ``repeats`` round trips of ``nbytes`` with ``peer``, which calls this at the
        same time with the other value of ``first``."""
        import torch.distributed as dist

        tensor = self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._device)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            if first:
                dist.send(tensor, peer)
                dist.recv(tensor, peer)
            else:
                dist.recv(tensor, peer)
                dist.send(tensor, peer)
            self._backend.synchronize()
            times.append(time.perf_counter() - began)
        return times

    def gather(self, values: list[float]) -> list[list[float]]:
        """Collective: the ``values`` of every rank, by rank; all give as many."""
        import torch.distributed as dist

        dtype = self._torch.float64 if self._host or self._backend.name == "cuda" else self._torch.float32
        own = self._torch.tensor(values, dtype=dtype, device=self._device)
        every = [self._torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        return [one.tolist() for one in every]

    def broadcast(self, text: str) -> str:
        """Collective: rank 0's ``text`` on every rank."""
        import torch.distributed as dist

        data = text.encode()
        length = self._torch.tensor([len(data)], dtype=self._torch.int64, device=self._device)
        dist.broadcast(length, 0)
        buffer = self._torch.zeros(int(length.item()), dtype=self._torch.uint8, device=self._device)
        if dist.get_rank() == 0:
            buffer.copy_(self._torch.tensor(list(data), dtype=self._torch.uint8))
        dist.broadcast(buffer, 0)
        return bytes(buffer.cpu().tolist()).decode()


def measures_everywhere(backend: Any) -> Measures | None:
    """``Measures`` of every rank, or None on all where one has no memory left for them; collective."""
    import torch
    import torch.distributed as dist

    made: Measures | None = None
    with contextlib.suppress(RuntimeError):  # out of memory is one
        made = Measures(backend)
    without = torch.tensor([float(made is None)], device=backend.device(backend.current_device()))
    dist.all_reduce(without)
    return made if without.item() == 0 else None


def disk_rates(folder: Path, nbytes: int = 1 << 24, repeats: int = 3) -> tuple[float, float]:
    """Bytes per second written to ``folder`` up to the disk (``fsync``), and read back past the page cache
    where the system can be asked to forget it; medians."""
    # Ranks of other containers may have this process's number, and the same folder.
    path = folder / f".scan-selftest-{secrets.token_hex(8)}"
    block = os.urandom(min(nbytes, 1 << 22))
    blocks = max(1, nbytes // len(block))
    written, read = [], []
    try:
        for _ in range(repeats):
            began = time.perf_counter()
            with open(path, "wb", buffering=0) as file:
                for _ in range(blocks):
                    file.write(block)
                os.fsync(file.fileno())
            written.append(time.perf_counter() - began)
            with open(path, "rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began = time.perf_counter()
                while file.read(len(block)):
                    pass
            read.append(time.perf_counter() - began)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    size = blocks * len(block)
    return size / statistics.median(written), size / statistics.median(read)
