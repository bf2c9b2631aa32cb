"""Random messages between two ranks over any transport, each compared with what the sender must have sent.

Both sides draw message ``number`` of a lane from the same seed, so the receiver needs nothing but the seed to
know every byte. Used with transports in processes (RDMA in a guest, NIXL) and with fakes in one process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mt_megatron.comm.errors import TransferTimeout
from mt_megatron.comm.transport import Edge, Label, Transport

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)

WINDOW = 4
"""Transfers of a lane that are under way at a time, at each end."""


def draw(seed: int, edge: Edge, number: int, most_bytes: int) -> tuple[torch.Tensor, Label, bool]:
    """Message ``number`` of ``edge``: tensor, label, and whether the receiver does not know its shape."""
    random = np.random.default_rng([seed, edge.source, edge.target, edge.lane, number])
    dtype = DTYPES[random.integers(len(DTYPES))]
    most = max(1, most_bytes // dtype.itemsize)
    # Log-uniform: as many messages below a kilobyte as between it and the largest; now and then none at all.
    count = 0 if random.random() < 0.02 else int(most ** random.random())
    dims = int(random.integers(0, 5))
    shape: tuple[int, ...] = (count,)
    for _ in range(dims - 1):
        split = int(random.integers(1, 5))
        if count % split == 0:
            shape = (*shape[:-1], split, shape[-1] // split)
    if dims == 0:
        count, shape = 1, ()
    data = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    flat = torch.from_numpy(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
    label = Label(number, int(random.integers(0, 8)), int(random.integers(0, 2)))
    return flat.reshape(shape), label, bool(random.random() < 0.5)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in rows."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def exchange(
    transport: Transport, own: int, peer: int, *, lanes: int, count: int, most_bytes: int, seed: int
) -> dict[str, Any]:
    """Send ``count`` messages in each of ``lanes`` lanes, one thread a lane, and receive as many.

    Returns how many messages and bytes arrived, and the seconds. Raises what went wrong in any thread.
    """
    edges = [Edge(*ends, lane) for ends in ((own, peer), (peer, own)) for lane in range(lanes)]
    transport.prepare(edges)
    received = [0] * lanes
    errors: list[BaseException] = []

    def send(lane: int) -> None:
        edge, under_way = Edge(own, peer, lane), deque[Any]()
        for number in range(count):
            tensor, label, unknown = draw(seed, edge, number, most_bytes)
            under_way.append(transport.post_send(edge, tensor, with_shape=unknown, label=label))
            del tensor
            if len(under_way) >= WINDOW:
                under_way.popleft().wait()
        while under_way:
            under_way.popleft().wait()

    def receive(lane: int) -> None:
        edge, expected = Edge(peer, own, lane), deque[tuple[Any, torch.Tensor]]()
        for number in range(count + WINDOW):
            if number < count:
                tensor, label, unknown = draw(seed, edge, number, most_bytes)
                shape = None if unknown else tensor.shape
                expected.append((transport.post_recv(edge, shape, tensor.dtype, label=label), tensor))
            if number >= WINDOW:
                handle, tensor = expected.popleft()
                found = handle.wait()
                if found.shape != tensor.shape or as_bytes(found) != as_bytes(tensor):
                    raise AssertionError(f"message {number - WINDOW} of {edge} is not what was sent")
                received[lane] += tensor.nbytes

    def guarded(work: Callable[[int], None], lane: int) -> None:
        try:
            work(lane)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    began = time.monotonic()
    threads = [
        threading.Thread(target=guarded, args=(work, lane))
        for work in (send, receive)
        for lane in range(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    transport.finish()
    return {"messages": count * lanes, "bytes": sum(received), "seconds": time.monotonic() - began}


class FolderBootstrap:
    """``comm.bootstrap.Bootstrap`` over files of one folder: for processes without a process group."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._folder = folder

    def publish(self, key: str, value: bytes) -> None:
        target = self._folder / key.replace("/", "+")
        if target.exists():
            raise AssertionError(f"{key} was published twice")
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        temporary.write_bytes(value)
        temporary.rename(target)

    def fetch(self, key: str, timeout: float) -> bytes:
        target = self._folder / key.replace("/", "+")
        deadline = time.monotonic() + timeout
        while not target.exists():
            if time.monotonic() > deadline:
                raise TransferTimeout(f"{key} is missing after {timeout} s")
            time.sleep(0.002)
        return target.read_bytes()


class SharedBootstrap:
    """``comm.bootstrap.Bootstrap`` over a dictionary: for ranks that are threads of one process."""

    def __init__(self, values: dict[str, bytes], rank: int) -> None:
        self.rank = rank
        self._values = values

    def publish(self, key: str, value: bytes) -> None:
        json.loads(value)
        if key in self._values:
            raise AssertionError(f"{key} was published twice")
        self._values[key] = value

    def fetch(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while key not in self._values:
            if time.monotonic() > deadline:
                raise TransferTimeout(f"{key} is missing after {timeout} s")
            time.sleep(0.001)
        return self._values[key]
