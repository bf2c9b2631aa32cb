"""Groups and numbers of collectives: one group for a name and its members, counted only while heard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mt_megatron.parallel.group_names import megatron_groups, name_of
from mt_megatron.seams import collectives, events
from tests.launch import run_ranks

HERE = "tests.scan.record.test_groups"


class Members:
    """A process group, as far as anybody here asks."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return len(self.ranks)


@pytest.fixture(autouse=True)
def counted_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(group.ranks))
    for name in ("_groups", "_seen", "_sent", "_received"):
        monkeypatch.setattr(collectives, name, {})


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    found: list[Any] = []
    stop = events.subscribe(lambda phase, name, attrs: found.append((phase, name, dict(attrs))))
    yield found
    stop()


def announce(name: str, group: Any, *given: torch.Tensor) -> None:
    with collectives.announced("all_reduce", name, group, *given):
        pass


def test_an_event_says_who_which_and_how_much(heard: list[Any]) -> None:
    group = Members(0, 2)
    announce("tp", group, torch.zeros(3), torch.zeros(2, dtype=torch.int8))
    expected = {"op": "all_reduce", "group": "tp", "ranks": (0, 2), "seq": 0, "bytes": 14}
    assert heard == [("begin", "collective", expected), ("end", "collective", {})]


def test_numbers_belong_to_a_name_and_its_members(heard: list[Any]) -> None:
    one, same, other = Members(0, 1), Members(0, 1), Members(2, 3)
    for name, group in (("tp", one), ("tp", one), ("tp", same), ("tp", other), ("dp", one), ("tp", one)):
        announce(name, group)
    begun = [attrs for phase, _, attrs in heard if phase == "begin"]
    assert [attrs["seq"] for attrs in begun] == [0, 1, 2, 0, 0, 3]
    # A listener may tell groups by the tuple itself.
    assert begun[0]["ranks"] is begun[2]["ranks"] is not begun[4]["ranks"]


def test_a_group_at_the_address_of_a_dead_one_is_not_taken_for_it(heard: list[Any]) -> None:
    found = set()
    for first in range(50):
        announce("tp", Members(first, first + 1))
        found.add(heard[-2][2]["ranks"])
    assert len(found) == 50


def test_nobody_counts_while_nobody_listens() -> None:
    announce("tp", Members(0, 1))
    assert collectives.known_groups() == []


def test_a_group_of_one_communicates_nothing(heard: list[Any]) -> None:
    announce("tp", Members(4))
    assert heard == []


def test_start_and_wait_have_one_number(heard: list[Any]) -> None:
    attrs = collectives.described("all_gather", "tp", Members(0, 1), 8)
    with collectives.part(attrs, "start"):
        pass
    announce("tp", Members(0, 1))
    with collectives.part(attrs, "wait"):
        pass
    said = [(a["seq"], a.get("asynchronous")) for phase, _, a in heard if phase == "begin"]
    assert said == [(0, "start"), (1, None), (0, "wait")]


def test_nothing_is_waited_for_that_nobody_heard_start(heard: list[Any]) -> None:
    with collectives.part(None, "wait"):
        pass
    assert heard == []


def test_transfers_are_counted_per_directed_edge() -> None:
    made = [
        collectives.sent(1, 8),
        collectives.received(1, -1),
        collectives.sent(2, 8),
        collectives.sent(1, 4),
    ]
    assert made == [("send", 1, 0, 8), ("recv", 1, 0, -1), ("send", 2, 0, 8), ("send", 1, 1, 4)]


def names() -> dict[str, Any]:
    """What groups are called on this rank of a layout of four."""
    from tests.patches import small_gpt

    small_gpt.start(tp=2)
    found: dict[str, Any] = {name: name_of(group) for name, group in megatron_groups().items()}
    mine = dist.new_group([0, 3], group_desc="mine")
    found["own"] = name_of(mine) if dist.get_rank() in (0, 3) else None
    return found | {"default": name_of(None), "known": name_of(dist.group.WORLD)}


def test_groups_are_called_by_their_axes() -> None:
    for rank, found in enumerate(run_ranks(4, f"{HERE}:names", timeout=60)):
        assert found["default"] == found["known"] == "world"
        # Without context parallelism the data-parallel group is one with it, whatever the library.
        assert found["tp"] == "tp" and found["dp"] == found["dp-cp"] == "dp" and found["tp-pp"] == "tp"
        assert found["own"] == ("mine" if rank in (0, 3) else None)
