"""The random messages of ``traffic`` over any transport, and bootstraps for ranks without a process group."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from mt_megatron.comm.errors import TransferTimeout
from mt_megatron.comm.transport import Edge, Transport
from tests.comm.traffic import LANES, Traffic


def exchange(transport: Transport, rank: int, *, messages: int, producers: int, seed: int) -> dict[str, Any]:
    """Send ``messages`` as rank 0 or 1 of two, from so many threads, and compare as many with what the peer
    must have sent. Returns counts of this rank; raises what went wrong in any thread."""
    edges = [Edge(*ends, lane) for ends in ((rank, 1 - rank), (1 - rank, rank)) for lane in range(LANES)]
    transport.prepare(edges)
    began = time.monotonic()
    traffic = Traffic(transport, seed, rank, messages)  # type: ignore[arg-type]
    traffic.run(producers)
    if traffic.counts["wrong"] or traffic.counts["received"] != messages:
        raise AssertionError(f"{traffic.counts} of {messages}")
    return {**traffic.counts, "bytes": traffic.bytes, "seconds": time.monotonic() - began}


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
