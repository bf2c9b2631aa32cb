"""Communication between two ranks: offsets are exact, lost attempts are made again, delays take what they
should."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.launch import run_ranks

CASES = "tests.scope.lab.wire_cases"
OFFSET = {"kind": "offset", "value": 0.25, "ranks": [0, 1]}
DROP = {"kind": "drop", "rate": 0.3, "timeout_ms": 1, "retries": 1, "ranks": [0, 1], "seed": 4}


def test_offsets_arrive_in_what_comes_from_the_other_end_alone() -> None:
    found: list[dict[str, Any]] = run_ranks(2, f"{CASES}:offsets")
    for rank, each in enumerate(found):
        theirs = [value + 10 * (1 - rank) + 0.5 for value in range(4)]
        own = [value + 10.0 * rank for value in range(4)]
        summed = [2.0 * value + 10.5 for value in range(4)]
        assert each["all_reduce"] == each["asynchronous"] == summed
        assert each["broadcast"] == (own if rank == 0 else theirs)
        both = [own, theirs] if rank == 0 else [theirs, own]
        assert each["all_gather"] == both and each["all_gather_into_tensor"] == both[0] + both[1]
        half = slice(2 * rank, 2 * rank + 2)
        exchanged = [own[half], theirs[half]] if rank == 0 else [theirs[half], own[half]]
        assert each["all_to_all_single"] == exchanged[0] + exchanged[1]
        assert each["unequal"] == ([0.0, 10.5, 11.5, 12.5] if rank == 0 else [1.5, 2.5, 3.5, 13.0])
        assert each["batch"] == each["p2p"] == theirs
        assert each["left alone"] == [[1, 3, 5, 7], [2.0, 2.0], [0, 1], [0.0]], "no data"
        assert all(each["restored"])


@pytest.mark.parametrize("rate", [pytest.param(1.0, marks=pytest.mark.daily), 0.4])
def test_lost_attempts_are_made_again(rate: float) -> None:
    found = run_ranks(2, f"{CASES}:lost", rate, 7)
    assert all(each["right"] for each in found)
    for each in found:
        # Sums, gathers, and both directions of the transfers, of 20 each.
        operations = each["dropped"] / 2
        assert operations == 80 if rate == 1 else 15 < operations < 50
        assert each["slow"] >= (20 if rate == 1 else 1)
    assert found[0]["dropped"] == found[1]["dropped"], "both ends agree without a message"


def test_edges_that_torch_carries_lose_and_change_once() -> None:
    sender, receiver = run_ranks(2, f"{CASES}:over_a_transport", timeout=120)
    assert sender["ended"] and sender["dropped"] == receiver["dropped"] == 3
    assert receiver["got"] == [[number + 0.5] * 4 for number in range(3)]


@pytest.mark.daily
def test_of_larger_groups_by_name_the_ends_alone() -> None:
    found = run_ranks(4, f"{CASES}:groups")
    assert found == [[0.0, 0.0, 0.0], [0.0, 0.5, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]


LAYOUTS = {
    "dp": "",
    "zero 1": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp": "--pipeline-model-parallel-size 2",
    "cp": "--context-parallel-size 2 --cp-comm-type p2p",
}


def _trained(flags: str, given: dict[str, Any], *, changes: bool, transport: str = "") -> None:
    for each in run_ranks(2, f"{CASES}:trained", flags, given, transport, timeout=240):
        assert each["undone"] == each["clean"] and each["back"] and each["restored"]
        assert (each["perturbed"] != each["clean"]) == changes and each["same bits"] != changes


def test_steps_with_lost_attempts_come_to_the_same_bits() -> None:
    _trained(LAYOUTS["pp"], DROP, changes=False)


@pytest.mark.daily
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout(layout: str) -> None:
    _trained(LAYOUTS[layout], DROP, changes=False)
    _trained(LAYOUTS[layout], OFFSET, changes=True)


@pytest.mark.daily
@pytest.mark.parametrize("flags", ["--p2p-transport shm", "--p2p-transport shm --pipeline-schedule zb-h1"])
def test_over_shared_memory(flags: str) -> None:
    _trained(LAYOUTS["pp"], DROP, changes=False, transport=flags)
    _trained(LAYOUTS["pp"], OFFSET, changes=True, transport=flags)


@pytest.mark.soak
@pytest.mark.parametrize("milliseconds", [2.0, 5.0, 20.0, 100.0])
def test_delays_take_what_they_should(milliseconds: float, record_property: Any) -> None:
    found = run_ranks(2, f"{CASES}:delays", milliseconds, 30, timeout=240)
    for each in found:
        for name, longer in each.items():
            middle = statistics.median(longer)
            record_property(f"{name} {milliseconds:g} ms", round(middle, 3))
            assert abs(middle - milliseconds) <= max(0.5, 0.1 * milliseconds), (name, middle)
