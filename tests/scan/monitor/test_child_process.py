"""Priority of a child that yields to the ranks, in a session of its own and in a shared one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mt_megatron.scan.monitor.child_process import NICENESS, start_child
from tests.launch import ROOT
from tests.scan.monitor.priority import HAS_AUTOGROUP, nicenesses, session_niceness

needs_autogroup = pytest.mark.skipif(
    not HAS_AUTOGROUP, reason="/proc/self/autogroup cannot be written: no autogroups, or a container's"
)

LOWERED = """
import os, sys, threading
from mt_megatron.scan.monitor.child_process import lower_priority
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.nice(int(sys.argv[1]))
lower_priority()
lower_priority()
print("lowered", file=sys.stderr, flush=True)
threading.Event().wait()
"""

# Leads a session, in which a child that does not lead it lowers its priority.
SHARED = """
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", sys.argv[1], "0"], stderr=subprocess.PIPE) as child:
    print(child.stderr.readline().decode().strip(), child.pid, file=sys.stderr, flush=True)
    child.wait()
"""


@contextmanager
def child_that(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """A child of ``start_child`` and the words of its first line."""
    child = start_child([sys.executable, "-c", program, *arguments], {"PYTHONPATH": str(ROOT)})
    assert child.stderr is not None
    try:
        yield child, child.stderr.readline().decode().split()
    finally:
        os.killpg(child.pid, 9)
        child.wait()
        child.stderr.close()


def test_all_threads_of_a_child_are_lowered_once() -> None:
    with child_that(LOWERED, "0") as (child, said):
        assert said == ["lowered"]
        assert nicenesses(child.pid) == {max(NICENESS, os.nice(0))}


def test_a_nicer_child_stays_as_it_is() -> None:
    with child_that(LOWERED, str(NICENESS + 3)) as (child, said):
        assert said == ["lowered"]
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(19, os.nice(0) + NICENESS + 3)


@needs_autogroup
def test_a_session_of_its_own_is_lowered() -> None:
    with child_that(LOWERED, "0") as (child, _):
        assert session_niceness(child.pid) == NICENESS


@needs_autogroup
def test_a_shared_session_is_left_alone() -> None:
    with child_that(SHARED, LOWERED) as (leader, said):
        assert said[0] == "lowered"
        assert nicenesses(int(said[1])) == {max(NICENESS, os.nice(0))}
        assert session_niceness(int(said[1])) == session_niceness(leader.pid) == 0
