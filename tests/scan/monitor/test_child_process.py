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
"""
WAITING = "threading.Event().wait()\n"
RESTORED = """
from mt_megatron.scan.monitor.child_process import restore_priority
restore_priority()
print("restored", file=sys.stderr, flush=True)
"""

# Leads a session, in which a child that does not lead it lowers its priority.
SHARED = """
import subprocess, sys, threading
with subprocess.Popen([sys.executable, "-c", sys.argv[1], "0"], stderr=subprocess.PIPE) as child:
    print(child.stderr.readline().decode().strip(), child.pid, file=sys.stderr, flush=True)
    child.wait()
"""


@contextmanager
def child_that(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """A child of ``start_child`` and the words of its first line."""
    child = start_child([sys.executable, "-c", program + WAITING, *arguments], {"PYTHONPATH": str(ROOT)})
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
        assert nicenesses(child.pid) == {min(os.nice(0) + NICENESS, 19)}


def test_a_nice_job_has_nicer_children() -> None:
    with child_that(LOWERED, "5") as (child, said):
        assert said == ["lowered"]
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(os.nice(0) + 5 + NICENESS, 19)


@needs_autogroup
def test_a_session_of_its_own_is_lowered() -> None:
    with child_that(LOWERED, "0") as (child, _):
        assert session_niceness(child.pid) == NICENESS


@needs_autogroup
def test_the_session_has_its_weight_back_for_the_end() -> None:
    with child_that(LOWERED + RESTORED, "0") as (child, said):
        assert said == ["lowered"]
        assert child.stderr is not None and child.stderr.readline() == b"restored\n"
        assert session_niceness(child.pid) == 0


@needs_autogroup
def test_a_shared_session_is_left_alone() -> None:
    with child_that(SHARED, LOWERED + WAITING) as (leader, said):
        assert said[0] == "lowered"
        assert nicenesses(int(said[1])) == {min(os.nice(0) + NICENESS, 19)}
        assert session_niceness(int(said[1])) == session_niceness(leader.pid) == 0
