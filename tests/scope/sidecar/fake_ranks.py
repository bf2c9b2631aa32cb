"""Ranks for tests of the sidecar: send frames over its socket and hear what it sends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mt_megatron.scope.format.frames import Decoder, encode
from mt_megatron.scope.sidecar.process import END
from tests.launch import ROOT


class FakeRank:
    """One connection."""

    def __init__(self, path: Path, *frames: Mapping[str, Any]) -> None:
        self.socket = _connected(path)
        self._decoder = Decoder()
        self._heard: list[dict[str, Any]] = []
        self.send(*frames)

    def send(self, *frames: Mapping[str, Any]) -> None:
        for frame in frames:
            self.socket.sendall(encode(frame))

    def hear(self, kind: str) -> dict[str, Any]:
        """The next frame of ``kind``."""
        while True:
            for index, frame in enumerate(self._heard):
                if frame["k"] == kind:
                    return self._heard.pop(index)
            piece = self.socket.recv(65536)
            if not piece:
                raise EOFError(f"the sidecar closed the connection before a {kind} frame")
            self._heard += self._decoder.feed(piece)

    def close(self) -> None:
        self.socket.close()


def _connected(path: Path, seconds: float = 20.0) -> socket.socket:
    """A connection: between its ``bind`` and its ``listen`` a server refuses one."""
    end = time.monotonic() + seconds
    while True:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.settimeout(seconds)
        try:
            found.connect(str(path))
            return found
        except ConnectionRefusedError:
            found.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def start_sidecar(
    run: Path, path: Path, *more: str, node: int = 0, parent: int | None = None, error: Any = None
) -> subprocess.Popen[bytes]:
    """A sidecar whose socket is there."""
    command = [sys.executable, "-m", "mt_megatron.scope.sidecar", "--run", str(run), "--socket", str(path)]
    command += ["--node", str(node), "--parent", str(parent or os.getpid()), *more]
    # From elsewhere: what it finds is the package, not the folder.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=error if error is not None else subprocess.PIPE,
        start_new_session=True,
    )
    until(lambda: path.exists() or process.poll() is not None, 30)
    return process


@contextlib.contextmanager
def sidecar(run: Path, path: Path, *more: str, node: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A sidecar that is ended at the end."""
    process = start_sidecar(run, path, *more, node=node)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(END)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for ``condition``. Raises ``TimeoutError``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.02)
