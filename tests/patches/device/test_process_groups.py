"""Process groups on cpu: nccl becomes gloo, and destroying them frees what they held."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch import run_ranks

RANKS = "tests.patches.ranks:"


def test_nccl_becomes_gloo_in_every_spelling() -> None:
    for found in run_ranks(2, RANKS + "backends_of_groups"):
        assert found["init"] == "gloo"
        assert found["interface"] == "lo"
        for name, library in (("new", "gloo"), ("both", "cpu:gloo"), ("none", "gloo")):
            assert found[name] == [library, [2.0, 2.0]]
        assert found["options"] == "gloo"


def _freed(times: int) -> None:
    for found in run_ranks(2, RANKS + "initialise_and_destroy", times, timeout=60 + 2 * times):
        assert found["during"][0] > found["before"][0] + 4, "no groups were made: the test proves nothing"
        assert found["after"] == found["before"]
        assert found["left"] == []


def test_destroy_model_parallel_frees_threads_and_sockets() -> None:
    _freed(10)


@pytest.mark.soak
def test_destroy_model_parallel_frees_threads_and_sockets_200_times() -> None:
    _freed(200)


def test_no_rank_goes_on_before_every_rank_has_connected_its_groups() -> None:
    """Without it a rank that ends its groups at once closes connections that a peer still waits for."""
    first, second = run_ranks(2, RANKS + "leave_as_soon_as_groups_are_made", 0.5)
    assert first["done"] >= second["made"]


@pytest.mark.soak
@pytest.mark.parametrize("load", range(4))
def test_groups_that_end_at_once_never_fail_a_peer(load: int) -> None:
    """500 starts beside two busy loops, four times."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert run_ranks(2, RANKS + "start_and_leave", 500, timeout=900) == [0, 0]
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_without_the_patch_groups_leak() -> None:
    for found in run_ranks(2, RANKS + "leak_without_the_patch", 5):
        assert found["after"][0] > found["before"][0] + 20
        assert found["after"][1] > found["before"][1] + 20


def test_groups_of_equal_ranks_are_one() -> None:
    first, second = run_ranks(2, RANKS + "groups_of_two")
    # [0, 1] and the rank alone, once with Megatron's timeout and once without.
    assert first["groups"] == [[0], [0], [0, 1], [0, 1]]
    assert second["groups"] == [[0, 1], [0, 1], [1], [1]]
    assert first["sum"] == second["sum"] == [3.0, 3.0, 1.0]
    assert first["apart"] and second["apart"], "a group made afterwards is the caller's own"


LEFT = """
import atexit, os, time

def threads():
    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]

# Handlers run in reverse order: this one last.
atexit.register(lambda: print("gloo" in " ".join(threads())))
import mt_megatron
mt_megatron.patch("cpu")
import torch.distributed as dist
from megatron.core import parallel_state
from mt_megatron.patches.device import pending_transfers

class Transfer:
    def wait(self, limit):
        print("waited")

pending_transfers._abandoned.append(Transfer())

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
# A thread gives itself its name, which on a busy machine comes a moment after its start.
deadline = time.monotonic() + 60
while "gloo" not in " ".join(threads()) and time.monotonic() < deadline:
    time.sleep(0.01)
print("gloo" in " ".join(threads()))
"""


@pytest.mark.parametrize(
    ("end", "left"),
    [
        ("", False),
        pytest.param("dist.destroy_process_group()", False, marks=pytest.mark.daily),
        pytest.param("parallel_state.destroy_model_parallel()", False, marks=pytest.mark.daily),
        ("atexit.register(dist.destroy_process_group)", False),
        pytest.param("raise SystemExit('an error')", False, marks=pytest.mark.daily),
        ("dist.destroy_process_group(); mt_megatron.unpatch()", True),
    ],
)
def test_no_group_is_left_to_the_interpreters_end(end: str, left: bool) -> None:
    """There a thread of Gloo that comes late to drop a tensor aborts the process. The last case is torch's
    and Megatron's own doing, without the patches. A transfer without a handle is waited for before."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEFT + end], capture_output=True, text=True, timeout=120
    )
    waited = [] if left else ["waited"]
    assert found.stdout.split() == ["True", *waited, str(left)], found.stderr
    assert "Error" not in found.stderr and found.returncode == int("raise" in end)
