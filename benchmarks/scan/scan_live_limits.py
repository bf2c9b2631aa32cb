"""Limits of one process that the kernel enforces (control groups, version 1) and competitors within them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SPIN = "while True: sum(i * i for i in range(50_000))"
_PERIOD = 100_000


class Limits:
    """One control group per rank, for processors and for the disk. Root only."""

    def __init__(self, ranks: int, disk_of: Path, shares: int = 1024) -> None:
        """``disk_of``: a path on the disk to be limited; ``shares`` of the processors that each rank has
        (1024: as any other process)."""
        self._shares = shares
        self._tag = f"mtl{os.getpid()}"
        self._ranks = range(ranks)
        self._disk = _whole_disk(disk_of)

    def _group(self, kind: str, rank: int) -> Path:
        # At the top: each rank competes with other processes as if it were in no group.
        return _ROOT / kind / f"{self._tag}r{rank}"

    def make(self) -> None:
        for rank in range(len(self._ranks) + 1):
            for kind in ("cpu", "blkio"):
                self._group(kind, rank).mkdir(exist_ok=True)
            (self._group("cpu", rank) / "cpu.shares").write_text(str(self._shares))

    def enter(self, rank: int) -> None:
        """Put the calling process into the groups of ``rank`` (between fork and exec)."""
        for kind in ("cpu", "blkio"):
            (self._group(kind, rank) / "cgroup.procs").write_text(str(os.getpid()))

    def release(self, pids: Iterable[int]) -> None:
        """Take these processes out of the ranks' groups, into one of their own."""
        for pid in pids:
            (_ROOT / "blkio" / "cgroup.procs").write_text(str(pid))
            (self._group("cpu", len(self._ranks)) / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        for rank in range(len(self._ranks) + 1):
            for kind in ("cpu", "blkio"):
                for _ in range(50):  # processes that were killed leave a little later
                    with contextlib.suppress(OSError):
                        self._group(kind, rank).rmdir()
                        break
                    time.sleep(0.1)

    @contextlib.contextmanager
    def quota(self, rank: int, processors: float) -> Iterator[None]:
        """The rank may use so much processor time per second."""
        path = self._group("cpu", rank) / "cpu.cfs_quota_us"
        path.write_text(str(round(_PERIOD * processors)))
        try:
            yield
        finally:
            path.write_text("-1")

    @contextlib.contextmanager
    def competitors(self, rank: int, count: int, part: float) -> Iterator[None]:
        """So many busy processes share the rank's part of the processors, which shrinks to ``part`` of what
        it was: what they take shall be the rank's, not that of the ranks on other hosts."""
        shares = self._group("cpu", rank) / "cpu.shares"
        shares.write_text(str(round(self._shares * part)))
        spinning = [
            subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _SPIN],
                preexec_fn=lambda: (self._group("cpu", rank) / "cgroup.procs").write_text(str(os.getpid())),
            )
            for _ in range(count)
        ]
        try:
            yield
        finally:
            for process in spinning:
                process.kill()
                process.wait()
            shares.write_text(str(self._shares))

    @contextlib.contextmanager
    def slow_reads(self, rank: int, per_second: int) -> Iterator[None]:
        """The rank may read from the disk so many times a second."""
        yield from self._throttled(rank, "blkio.throttle.read_iops_device", per_second)

    @contextlib.contextmanager
    def slow_writes(self, rank: int, bytes_per_second: int) -> Iterator[None]:
        """The rank may write so many bytes a second to the disk."""
        yield from self._throttled(rank, "blkio.throttle.write_bps_device", bytes_per_second)

    def _throttled(self, rank: int, name: str, value: int) -> Iterator[None]:
        path = self._group("blkio", rank) / name
        path.write_text(f"{self._disk} {value}")
        try:
            yield
        finally:
            path.write_text(f"{self._disk} 0")


@contextlib.contextmanager
def limits(ranks: int, disk_of: Path, shares: int = 1024) -> Iterator[Limits]:
    """The groups; they are removed when their processes are gone."""
    found = Limits(ranks, disk_of, shares)
    try:
        found.make()
        yield found
    finally:
        found.remove()


def _whole_disk(path: Path) -> str:
    device = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (node / "partition").exists():
        node = node.parent
    return (node / "dev").read_text().strip()
