"""Pairs of forked processes that are connected by a transport, and random messages with known contents."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mt_megatron.comm import message
from mt_megatron.comm.bootstrap import StoreBootstrap
from mt_megatron.comm.shared_memory.ring import RingSize
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport
from mt_megatron.comm.transport import Edge, Label

THERE, BACK = Edge(0, 1, 0), Edge(1, 0, 0)
SMALL = RingSize(4096, 8)
RING = SMALL.slots * SMALL.slot_bytes
FLOAT = torch.float32

DTYPES = [dtype for name, dtype in sorted((str(each), each) for each in message._DTYPES.values())]

Role = Callable[[SharedMemoryTransport], Any]


def connected(store: str, rank: int, edges: list[Edge], **options: Any) -> SharedMemoryTransport:
    """The transport of ``rank`` of 2; ``store``: a file that both name."""
    torch.set_num_threads(1)
    options = {"timeout": 30.0, "size": SMALL, **options}
    transport = SharedMemoryTransport(StoreBootstrap(dist.FileStore(store, 2), rank, "pair"), **options)
    transport.prepare(edges)
    return transport


class Child:
    """A forked process that runs a function and writes what it returns, as JSON, to a pipe."""

    def __init__(self, function: Callable[[], Any]) -> None:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(read)
            code = 1
            try:
                text = json.dumps(function())
                with open(write, "w") as file:
                    file.write(text)
                code = 0
            except BaseException:  # noqa: BLE001 - a fork must not return into the caller.
                with open(write, "w") as file:
                    file.write(traceback.format_exc())
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(write)
        self._read = open(read)  # noqa: SIM115 - until result() or kill().

    def result(self) -> Any:
        """What the function returned; RuntimeError if it failed."""
        with self._read:
            text = self._read.read()
        _, status = os.waitpid(self.pid, 0)
        if status:
            raise RuntimeError(f"process {self.pid} ended with status {status}:\n{text}")
        return json.loads(text)

    def reap(self) -> None:
        """After a kill."""
        os.waitpid(self.pid, 0)
        self._read.close()


def run_pair(first: Role, second: Role, edges: list[Edge] | None = None, **options: Any) -> list[Any]:
    """What two roles return, run in two processes with a transport each, which each closes at its end."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")

        def run(rank: int, role: Role) -> Any:
            transport = connected(store, rank, edges or [THERE, BACK], **options)
            try:
                return role(transport)
            finally:
                transport.close()

        children = [
            Child(lambda rank=rank, role=role: run(rank, role)) for rank, role in enumerate((first, second))
        ]
        results: list[Any] = []
        for child in children:
            try:
                results.append(child.result())
            except RuntimeError as error:
                results.append(error)
        failed = [each for each in results if isinstance(each, RuntimeError)]
        if failed:
            raise AssertionError("\n".join(map(str, failed)))
        return results


def signal_ready(transport: SharedMemoryTransport) -> None:
    """Let the peer's ``await_ready`` return."""
    transport.post_send(THERE if transport._own == 0 else BACK, torch.ones(1))


def await_ready(transport: SharedMemoryTransport) -> None:
    transport.post_recv(BACK if transport._own == 0 else THERE, (1,), FLOAT).wait()


def raises(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


_MOST_LONG = 200_000


def drawn(seed: int, lane: int, number: int) -> tuple[Tensor, Label]:
    """Message ``number`` of a lane: any dtype, 0 to 4 dimensions, in rows or not; mostly small."""
    random = np.random.Generator(np.random.PCG64([seed, lane, number]))
    dtype = DTYPES[int(random.integers(len(DTYPES)))]
    kind = random.random()
    most = 64 if kind < 0.6 else 4096 if kind < 0.97 else _MOST_LONG
    shape = _shape(random, int(random.integers(most)))
    count = int(np.prod(shape)) if shape else 1
    raw = torch.from_numpy(np.frombuffer(random.bytes(count * dtype.itemsize), dtype=np.uint8).copy())
    if dtype is torch.bool:
        raw &= 1
    tensor = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    if len(shape) > 1 and random.random() < 0.3:
        tensor = tensor.transpose(0, -1)
    if dtype.is_complex and dtype is not torch.complex32 and random.random() < 0.5:
        tensor = tensor.conj()
    label = Label(number, lane, int(random.integers(2)))
    return tensor, label


def _shape(random: Any, count: int) -> tuple[int, ...]:
    dims = int(random.integers(5))
    if not dims:
        return ()
    if random.random() < 0.05:
        return (0, *(int(each) for each in random.integers(1, 5, dims - 1)))
    inner = tuple(int(each) for each in random.integers(1, 4, dims - 1))
    return (max(1, count // max(1, int(np.prod(inner)))), *inner)


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements in rows, as uint8: NaNs compare too. By strides of bytes, as torch
    has no kernel that copies some dtypes."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    if not tensor.is_contiguous():
        size = tensor.dtype.itemsize
        # One more dimension: the bytes of each element.
        strides = [size * each for each in tensor.stride()]
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        offset = tensor.storage_offset() * size
        return flat.as_strided((*tensor.shape, size), (*strides, 1), offset).reshape(-1)
    return tensor.reshape(-1).view(torch.uint8)
