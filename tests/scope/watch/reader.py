"""A sidecar in the test's own process: takes the frames of all ranks and keeps them."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.scope.format.frames import Decoder, encode
from mt_megatron.scope.format.statistics import STATISTICS, combined


class Reader:
    """Stands for ``SidecarProcess``. ``make`` is a ``MakeSidecar`` that gives this one."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mtscope-"))
        self.socket = self._folder / "s"
        self.frames: dict[int, list[dict[str, Any]]] = {}
        """By rank."""

        self.lines: list[str] = []
        self._links: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._server: socket.socket | None = None

    def make(self, run: Path, node: int, **options: Any) -> Reader:
        self.run, self.node, self.options = run, node, options
        return self

    def start(self) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.socket))
        self._server.listen(64)
        self._spawn(self._accept)

    def has_told(self, seconds: float) -> bool:
        return False

    def _spawn(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        assert self._server is not None
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            self._spawn(self._read, link)

    def _read(self, link: socket.socket) -> None:
        decoder, kept = Decoder(), list[dict[str, Any]]()
        with link:
            while True:
                try:
                    piece = link.recv(1 << 20)
                except OSError:
                    return
                if not piece:
                    return
                for frame in decoder.feed(piece):
                    if frame["k"] == "hello":
                        kept = self.frames.setdefault(int(frame["rank"]), [])
                        self._links[int(frame["rank"])] = link
                    kept.append(frame)

    def tell(self, rank: int, frame: Mapping[str, Any]) -> None:
        """Send ``frame`` to ``rank``."""
        self._links[rank].sendall(encode(frame))

    def wait(self, world: int, seconds: float = 20.0) -> None:
        """Until all ranks have said goodbye."""
        until = time.monotonic() + seconds
        while sum(any(f["k"] == "bye" for f in frames) for frames in self.frames.values()) < world:
            if time.monotonic() > until:
                raise TimeoutError({rank: [f["k"] for f in frames] for rank, frames in self.frames.items()})
            time.sleep(0.01)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def everything(self) -> list[tuple[int, dict[str, Any]]]:
        """Rank and frame of every frame."""
        return [(rank, frame) for rank, frames in sorted(self.frames.items()) for frame in frames]

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        """Rank and frame of every frame of ``kind``."""
        return [(rank, f) for rank, frames in sorted(self.frames.items()) for f in frames if f["k"] == kind]


def parts_of(frames: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[tuple[int, str, str], list[Any]]:
    """The ranks' parts by step, path and statistic."""
    found: dict[tuple[int, str, str], list[Any]] = {}
    for sent in frames.values():
        schemas: dict[int, Any] = {}
        for frame in sent:
            if frame["k"] == "schema":
                schemas[frame["id"]] = frame["entries"]
            elif frame["k"] == "stats":
                at = 0
                for path, name, length in schemas[frame["id"]]:
                    part = frame["values"][at : at + length]
                    found.setdefault((frame["i"], path, name), []).append(part)
                    at += length
                assert at == len(frame["values"]), "schema and values differ in length"
    return found


def values_of(frames: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[tuple[int, str, str], float]:
    """The statistics, as a sidecar makes them of the ranks' parts."""
    return {
        (step, path, name): STATISTICS[name].value(combined(name, parts))
        for (step, path, name), parts in parts_of(frames).items()
    }


def vectors_of(frames: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[tuple[int, str, str], list[float]]:
    """The vectors of statistics that have one."""
    found = {}
    for key, parts in parts_of(frames).items():
        vector = STATISTICS[key[2]].vector
        if vector is not None:
            found[key] = np.asarray(vector(combined(key[2], parts)), np.float64).tolist()
    return found
