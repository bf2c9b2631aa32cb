"""Starts the processes of one side, which find each other over loopback only, and waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mt_megatron.backends.distributed.rendezvous import loopback_store
from mt_megatron.errors import MtMegatronError
from mt_megatron.host import limits

from .side import Side

_GRACE_SECONDS = 3.0
_TAIL_CHARACTERS = 3000
_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class SideFailedError(MtMegatronError):
    """A side ended without its records; the message holds the end of what it said."""


def run_side(
    side: Side, folder: Path, timeout: float, progress: Callable[[int, int], None] | None = None
) -> None:
    """Run ``side`` to its end; its records are then below ``folder``. ``progress(done, total)`` is called
    many times a second with outputs and gradients of modules, summed over the ranks.

    Raises ``SideFailedError`` when a process fails or ``timeout`` seconds pass; by then all are gone.
    """
    own = folder / side.name
    own.mkdir(parents=True, exist_ok=True)
    for stale in own.glob("rank_*"):
        stale.unlink()
    side.write(own / "side.json")
    store, port = loopback_store() if side.processes > 1 else (None, 0)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(side.processes):
            processes.append(_start(side, folder, rank, port))
        problem = _wait(processes, timeout, own, progress)
    finally:
        for process in processes:
            _end(process)
        del store
    if problem is not None:
        rank, why = problem
        said = (own / f"stderr.{rank}").read_text(errors="replace").strip()[-_TAIL_CHARACTERS:]
        raise SideFailedError(
            f"side {side.name} ({side.backend}): rank {rank} {why}. The end of what it said:\n{said}"
        )


def _start(side: Side, folder: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    if side.processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, limits.processors() // side.processes)))
        count = str(side.processes)
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    own = folder / side.name
    with open(own / f"stderr.{rank}", "wb") as stderr, open(own / f"stdout.{rank}", "wb") as stdout:
        return subprocess.Popen(
            [sys.executable, "-m", "mt_megatron.diverge.worker", str(folder), side.name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _counts(own: Path) -> tuple[int, int]:
    """Done and expected outputs and gradients of modules, summed over the ranks that are in their step. A
    rank's file has the expected number in its first line, then a byte for each that is computed."""
    read = [path.read_bytes().partition(b"\n") for path in own.glob("rank_*.progress")]
    return sum(len(done) for _, _, done in read), sum(int(total) for total, begun, _ in read if begun)


def _wait(
    processes: list[subprocess.Popen[bytes]],
    timeout: float,
    own: Path,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, str] | None:
    """None when all are done; else a rank and what became of it."""
    deadline = time.monotonic() + timeout
    failed: tuple[int, float] | None = None
    while True:
        codes = [process.poll() for process in processes]
        if progress is not None:
            progress(*_counts(own))
        if all(code == 0 for code in codes):
            return None
        first = next((rank for rank, code in enumerate(codes) if code), None)
        if first is not None and failed is None:
            failed = (first, time.monotonic())
        if failed is not None and (None not in codes or time.monotonic() - failed[1] > _GRACE_SECONDS):
            return failed[0], f"ended with exit code {codes[failed[0]]}"
        if time.monotonic() > deadline:
            return codes.index(None), f"was not done after {timeout:g} s"
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    # Each process leads a session of its own, so this reaches what it started and nothing else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
