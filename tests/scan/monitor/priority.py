"""Niceness of other processes, for tests of those that yield to the ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

HAS_AUTOGROUP = os.access("/proc/self/autogroup", os.W_OK)


def nicenesses(pid: int) -> set[int]:
    """Of the process's threads."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
    return found


def session_niceness(pid: int) -> int:
    """Of the process's autogroup: ``/autogroup-19678 nice 10``."""
    return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
