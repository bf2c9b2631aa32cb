"""Ranks forked from a process that has torch and Megatron loaded: a run starts in tenths of a second.

The process that forks has no thread but the one that watches its parent, and never joins a process
group itself. Ranks meet over a file, so nothing listens.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

STEP, POINT = b"s", b"p"
_LIMIT_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When all ranks of a run are killed."""

    seconds: float | None = None
    """So long after they were forked."""

    steps: int | None = None
    """After so many steps of this run ..."""

    delay: float = 0.0
    """... and so many seconds."""

    point: str | None = None
    """When ``rank`` is at this point of a save ..."""

    rank: int = 0
    nth: int = 1
    """... for the nth time."""


def run_once(world: int, work: Callable[[], None], kill: Kill | None, rendezvous: Path, log: Path) -> bool:
    """Run ``work`` in ``world`` ranks of one Gloo group and kill them all as ``kill`` says.

    Returns whether they were killed; False when all ended by themselves with 0. Raises
    ``AssertionError`` with the end of the log when one failed, or none was done in time.
    """
    rendezvous.unlink(missing_ok=True)
    reading, writing = os.pipe()
    children: list[int] = []
    try:
        for rank in range(world):
            child = os.fork()
            if child == 0:
                os.close(reading)
                _be_rank(rank, world, work, kill, rendezvous, log, writing)
            children.append(child)
        os.close(writing)
        return _watch(children, reading, kill, log)
    finally:
        os.close(reading)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _watch(children: list[int], reading: int, kill: Kill | None, log: Path) -> bool:
    began = time.monotonic()
    due = None if kill is None or kill.seconds is None else began + kill.seconds
    steps = 0
    left = list(children)
    while left:
        now = time.monotonic()
        assert now - began < _LIMIT_SECONDS, f"no end in sight: {_tail(log)}"
        if due is not None and now >= due:
            for child in left:
                os.kill(child, signal.SIGKILL)
            for child in left:
                os.waitpid(child, 0)
            children.clear()
            return True
        wait = 0.02 if due is None else min(0.02, due - now)
        if select.select([reading], [], [], wait)[0]:
            for told in os.read(reading, 100) or []:
                steps += bytes([told]) == STEP
                if bytes([told]) == POINT or (kill is not None and steps == kill.steps):
                    due = time.monotonic() + (kill.delay if kill is not None else 0.0)
        for child in list(left):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                left.remove(child)
                children.remove(child)
                assert status == 0, f"a rank ended with status {status}: {_tail(log)}"
    return False


def _be_rank(
    rank: int,
    world: int,
    work: Callable[[], None],
    kill: Kill | None,
    rendezvous: Path,
    log: Path,
    writing: int,
) -> None:
    status = 1
    try:
        with open(log, "ab", buffering=0) as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            GROUP_RANK="0",
        )
        _tell(kill, rank, writing)
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=_LIMIT_SECONDS),
        )
        work()
        dist.barrier()
        status = 0
    except BaseException:  # noqa: BLE001 (the log has it, and the exit code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: what the parent registered to run at its end is not the child's to run.
        os._exit(status)


def _tell(kill: Kill | None, rank: int, writing: int) -> None:
    from mt_megatron.checkpoint import files as checkpoint_files
    from mt_megatron.seams import events

    if rank == 0:
        events.subscribe(
            lambda phase, name, attrs: None if (phase, name) != ("end", "step") else _write(writing, STEP)
        )
    if kill is None or kill.point is None or rank != kill.rank:
        return
    wanted, count = kill, 0

    def reached(point: str) -> None:
        nonlocal count
        if point == wanted.point:
            count += 1
            if count == wanted.nth:
                _write(writing, POINT)
                # Whoever is here goes no further; the others run on until the kill comes.
                time.sleep(_LIMIT_SECONDS)

    checkpoint_files.reached_point = reached


def _write(writing: int, what: bytes) -> None:
    os.write(writing, what)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:] if log.exists() else "no log"
