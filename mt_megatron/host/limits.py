"""Memory, shared memory, processors and open files that this process may use.

The least of the machine's and those of each control group from the process's own up to the root (cgroup
versions 1 and 2): a container sees the machine's figures in /proc, and is ended by its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Space:
    """Bytes."""

    total: int
    available: int


def memory() -> Space:
    """Memory of this process: the limit, and what can still be allocated below it. A larger allocation is not
    refused by the kernel, which ends processes of the control group instead."""
    import psutil

    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for folder in _groups("memory"):
        for most, now, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = _number(folder / most), _number(folder / now)
            if limit is None or used is None:
                continue
            # Pages of files count as used, and are given up before anything is refused.
            files = sum(_stat(folder, f"{prefix}{name}") for name in ("active_file", "inactive_file"))
            total, available = min(total, limit), min(available, max(0, limit - used + files))
    return Space(total=total, available=available)


def shared_memory() -> Space | None:
    """``/dev/shm``, where data loader workers leave their batches, or what the process's memory leaves of it;
    None where it is not mounted."""
    try:
        mount = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    limit = memory()
    size, free = mount.f_blocks * mount.f_frsize, mount.f_bavail * mount.f_frsize
    return Space(total=min(size, limit.total), available=min(free, limit.available))


def processors() -> int:
    """Processors that this process may keep busy: those it may run on, and the quota of time, rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups("cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if (both := _text(folder / "cpu.max").split()) and both[0] != "max":
            quota, period = int(both[0]), int(both[1])
        if quota is not None and period and quota > 0:
            allowed = min(allowed, math.ceil(quota / period))
    return max(1, allowed)


def open_files() -> int | None:
    """Files that this process may hold open; None where the system sets no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control groups that may limit ``controller``, each with its parents."""
    own: dict[str, str] = {}
    for line in _text(_PROC / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for line in _text(_PROC / "mountinfo").splitlines():
        # man 5 proc: "36 35 98:0 /root /mount options [tags] - type source options".
        head, _, tail = line.partition(" - ")
        kind, _, options = tail.partition(" ")
        version = {"cgroup2": "", "cgroup": controller}.get(kind)
        if version is None or version not in own:
            continue
        if version and version not in options.replace(" ", ",").split(","):
            continue
        root, mount = (Path(_unescaped(word)) for word in head.split()[3:5])
        group = Path(own[version])
        # A container without a namespace of groups has its own group mounted as the root, under another path.
        below = group.relative_to(root) if group.is_relative_to(root) else Path(".")
        yield from (mount / below, *(mount / each for each in below.parents))


def _unescaped(word: str) -> str:
    """``word`` of mountinfo, where blanks and backslashes are octal numbers."""
    return word.encode().decode("unicode_escape").encode("latin-1").decode()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Content of ``path``; None without such a file, and for ``max``."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _stat(folder: Path, name: str) -> int:
    found = dict(line.split(None, 1) for line in _text(folder / "memory.stat").splitlines())
    return int(found.get(name, 0))
