"""Extra work in this process: matrix products, disk writes, busy children, stopping itself for a while."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SIZE = 192
_BLOCK = 1 << 18

# The child stops its parent and lets it go on; a second one does so too in case the first is killed.
_STOPPER = """
import os, signal, sys, time
parent, seconds = int(sys.argv[1]), float(sys.argv[2])
guard = os.fork()
if guard == 0:
    time.sleep(seconds + 0.2)
else:
    if os.getppid() != parent:
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(parent, signal.SIGCONT)
    os.waitpid(guard, 0)
    os._exit(0)
if open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[19] == sys.argv[3]:
    os.kill(parent, signal.SIGCONT)
os._exit(0)
"""

_SPINNER = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    sum(i * i for i in range(50_000))
"""


class Products:
    """Matrix products on the current device, so many that they take a given time."""

    def __init__(self, backend: Any) -> None:
        """``backend`` is a ``mt_megatron.backends.base.Backend``."""
        import torch

        self._backend = backend
        self._on_host = backend.device_type == "cpu"
        size = _SIZE if self._on_host else 2048
        self._a = torch.ones(size, size, device=backend.device(backend.current_device()))
        self._out = torch.empty_like(self._a)
        self._each = 0.0
        self._torch = torch

    def burn(self, seconds: float) -> None:
        """On the host: use so much processor time. On a device: queue products that take so long there."""
        if self._on_host:
            # Processor time, not the clock's: a busy machine is no excuse for less work.
            until = time.thread_time() + seconds
            limit = time.monotonic() + 20 * seconds
            while time.thread_time() < until and time.monotonic() < limit:
                self._product()
            return
        if not self._each:
            self._each = self._measured()
        for _ in range(round(seconds / self._each)):
            self._product()

    def _product(self) -> None:
        with self._torch.no_grad():
            self._torch.mm(self._a, self._a, out=self._out)

    def _measured(self) -> float:
        self._product()
        self._backend.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            self._product()
        self._backend.synchronize()
        return max(1e-6, (time.perf_counter() - began) / 20)


def write_for(seconds: float, scratch: Path) -> None:
    """Write to ``scratch`` and wait for the disk, again and again for ``seconds``; it is removed."""
    until = time.monotonic() + seconds
    block = os.urandom(_BLOCK)
    descriptor = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        while time.monotonic() < until:
            os.pwrite(descriptor, block, 0)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            scratch.unlink()


def stop_this_process(seconds: float) -> subprocess.Popen[bytes]:
    """Have this process stopped (SIGSTOP) and go on (SIGCONT) after ``seconds``; returns at once."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return _child(_STOPPER, str(os.getpid()), f"{seconds}", started)


def busy_process() -> subprocess.Popen[bytes]:
    """A child that keeps one of this process's processors busy until it is killed or this process ends."""
    return _child(_SPINNER, str(os.getpid()))


def _child(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    # -S -E: none of this installation's start-up code, which would import torch.
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
