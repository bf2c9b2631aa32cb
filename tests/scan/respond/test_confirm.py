"""The paired measurement: verdicts, controls, and three ranks of which one works six times as much."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.cli.scan.confirm import _alone, _answer
from mt_megatron.errors import ConfigError
from mt_megatron.scan.respond.confirm import (
    BLOCKS,
    Confirmation,
    Request,
    control_pairs,
    judged,
    measure,
    request_from,
)
from mt_megatron.scan.respond.measures import LARGE_BYTES
from tests.launch import run_ranks

COMPUTE = Request(identity="a", what="compute", ranks=(1,))


def verdict(ratios: list[float], least: float = 0.0) -> Confirmation:
    return judged(COMPUTE, ratios, 1.05, least, "", 1.0)


def test_a_verdict_needs_nearly_all_blocks() -> None:
    assert verdict([1.2] * BLOCKS).verdict == "confirmed"
    assert verdict([1.2] * (BLOCKS - 2) + [0.9] * 2).verdict == "confirmed"
    assert verdict([1.2] * (BLOCKS - 3) + [0.9] * 3).verdict == "inconclusive"
    assert verdict([1.0] * BLOCKS).verdict == "refuted"
    assert verdict([1.0] * (BLOCKS - 2) + [3.0] * 2).verdict == "refuted", "two blocks were disturbed"
    assert verdict([1.0] * (BLOCKS - 3) + [3.0] * 3).verdict == "inconclusive"
    assert verdict([1.2] * BLOCKS, least=1e-6).verdict == "refuted", "a ratio of times too short to matter"


def test_half_a_line_hides_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    path.write_text('{"identity": "a", "te\n{"identity": "b"}\n{"id')
    assert _answer(path, "b", time.monotonic() + 60) == {"identity": "b"}
    assert _answer(path, "a", time.monotonic() - 1) is None


def test_two_who_ask_the_same_run_wait_for_each_other(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with _alone(lock, time.monotonic() + 60) as first:
        with _alone(lock, time.monotonic()) as second:
            assert first and not second
        later = threading.Thread(target=lambda: waited.append(_enter(lock)))
        waited: list[bool] = []
        later.start()
        time.sleep(0.3)
        assert not waited
    later.join(60)
    assert waited == [True]


def _enter(lock: Path) -> bool:
    with _alone(lock, time.monotonic() + 60) as alone:
        return alone


def test_a_pair_is_compared_with_pairs_of_others_first() -> None:
    assert control_pairs((0, 1), ["a"] * 4) == [(2, 3), (1, 2), (0, 2)]
    assert control_pairs((0, 1), ["a"] * 3) == [(1, 2), (0, 2)]
    assert all(not {2, 3} & set(pair) for pair in control_pairs((2, 3), ["a"] * 8))
    assert (0, 1) not in control_pairs((1, 0), ["a"] * 4)


@pytest.mark.parametrize("order", ["aaaabbbb", "abababab"])
def test_a_pair_is_compared_with_pairs_of_its_kind(order: str) -> None:
    def crosses(pair: tuple[int, ...]) -> bool:
        return order[pair[0]] != order[pair[1]]

    for suspects in itertools.combinations(range(8), 2):
        pairs = control_pairs(suspects, order)
        assert len(pairs) == 3 and {crosses(pair) for pair in pairs} == {crosses(suspects)}
        assert not any(set(pair) & set(suspects) for pair in pairs)


def test_a_nodes_pair_is_compared_with_pairs_that_cross_other_borders() -> None:
    assert control_pairs((2, 0), "aabbccdd") == [(4, 6), (1, 5), (1, 7)], "three ways, none to the host b"
    assert control_pairs((2, 0), "aabbcc") == [(1, 5), (1, 4), (0, 4)], "none with the suspect's host"
    assert control_pairs((0, 1), "ab") == []
    hosts = "aabbccddee"
    pairs = control_pairs((2, 0), hosts)
    ways = {frozenset(hosts[rank] for rank in pair) for pair in pairs}
    assert len(ways) == 3 and not set("ab") & {host for way in ways for host in way}


class Wires:
    """Measures of one rank over links of known times, without processes; ``gather`` waits for all ranks."""

    def __init__(
        self, rank: int, seconds: Callable[[int, int], tuple[float, float]], gathered: Gathered
    ) -> None:
        self.rank, self.seconds, self.gathered = rank, seconds, gathered

    def barrier(self) -> None:
        """Nobody hurries."""

    def exchange(self, peer: int, *, first: bool, nbytes: int, repeats: int) -> list[float]:
        return [self.seconds(self.rank, peer)[nbytes == LARGE_BYTES]] * repeats

    def gather(self, values: list[float]) -> list[list[float]]:
        return self.gathered.all(self.rank, values)


class Products:
    """Measures of one rank whose products take the same time in every block."""

    flops_per_product = 1.0

    def __init__(self, seconds: float, rank: int, gathered: Gathered) -> None:
        self.products = lambda count: count * seconds
        self.gather = lambda values: gathered.all(rank, values)

    def barrier(self) -> None:
        """Nobody hurries."""


class Gathered:
    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.rows: list[list[float]] = [[] for _ in range(world)]

    def all(self, rank: int, values: list[float]) -> list[list[float]]:
        self.rows[rank] = values
        self.barrier.wait(60)
        rows = list(self.rows)
        # The next gathering may not begin before every rank has these.
        self.barrier.wait(60)
        return rows


def link_verdict(
    ranks: tuple[int, int], hosts: str, seconds: Callable[[int, int], tuple[float, float]]
) -> Confirmation:
    """Confirmations by all ranks of ``hosts``; ``seconds``: of a round trip and of 1 MiB, by two ranks."""
    request = Request(identity="a", what="link", ranks=ranks)
    return verdict_of_all(request, hosts, lambda rank, gathered: Wires(rank, seconds, gathered))


def verdict_of_all(request: Request, hosts: str, measures: Callable[[int, Gathered], Any]) -> Confirmation:
    """The same confirmation on all ranks of ``hosts``; ``measures``: of a rank."""
    gathered = Gathered(len(hosts))

    def found(rank: int) -> Confirmation:
        return measure(request, measures(rank, gathered), rank, hosts)

    with ThreadPoolExecutor(len(hosts)) as ranks_at_work:
        first, *others = ranks_at_work.map(found, range(len(hosts)))
    assert all((each.verdict, each.ratio) == (first.verdict, first.ratio) for each in others)
    return first


@pytest.mark.parametrize(
    ("suspect", "verdict", "ratio"), [(1, "confirmed", 1.2), (0, "refuted", 1 / 1.1), (2, "refuted", 1 / 1.1)]
)
def test_products_of_even_blocks_leave_nothing_open(suspect: int, verdict: str, ratio: float) -> None:
    """Of real ranks a busy machine leaves some measurements open, which are made again."""
    request = Request(identity="a", what="compute", ranks=(suspect,))
    seconds = [1e-3, 1.2e-3, 1e-3]
    found = verdict_of_all(request, "aaa", lambda rank, gathered: Products(seconds[rank], rank, gathered))
    assert found.verdict == verdict and found.ratio == pytest.approx(ratio)


def test_a_sound_network_between_hosts_is_not_slow_beside_one_within() -> None:
    def seconds(rank: int, peer: int) -> tuple[float, float]:
        return (1e-4, 1e-3) if (rank < 4) == (peer < 4) else (5e-4, 5e-3)

    for ranks in ((0, 4), (3, 4), (2, 3)):
        assert link_verdict(ranks, "aaaabbbb", seconds).verdict == "refuted"
    slow = {0, 2}
    only = link_verdict((0, 2), "aab", lambda rank, peer: (9.0, 9.0) if {rank, peer} == slow else (1.0, 1.0))
    assert only.verdict == "confirmed", "the pair itself is slow beside its like"
    alone = link_verdict((0, 1), "aab", seconds)
    assert alone.verdict == "inconclusive"
    assert "ranks 0, 1: the run has no other pair within a host to compare it with" in alone.text


def test_a_node_is_not_slow_beside_a_shorter_way_between_others() -> None:
    """Hosts c and d share a switch; every other way is longer."""
    hosts = "aabbccdd"

    def sound(rank: int, peer: int) -> tuple[float, float]:
        return (1e-4, 1e-3) if {hosts[rank], hosts[peer]} == {"c", "d"} else (4e-4, 4e-3)

    def slow(rank: int, peer: int) -> tuple[float, float]:
        quick, bulk = sound(rank, peer)
        return (2 * quick, 2 * bulk) if "b" in (hosts[rank], hosts[peer]) else (quick, bulk)

    assert link_verdict((2, 0), hosts, sound).verdict == "refuted"
    assert link_verdict((2, 0), hosts, slow).verdict == "confirmed"


@pytest.mark.parametrize(
    ("slow", "verdict", "measure_of"),
    [
        ((1.5e-4, 14e-3), "confirmed", "1 MiB"),  # a round trip of a larger ratio, too short to matter
        ((1e-3, 10e-3), "confirmed", "round trip"),
        ((1.5e-4, 10e-3), "refuted", "round trip"),
    ],
)
def test_either_measure_may_confirm_a_link_and_both_refute_it(
    slow: tuple[float, float], verdict: str, measure_of: str
) -> None:
    found = link_verdict((1, 2), "aaaa", lambda rank, peer: slow if {rank, peer} == {1, 2} else (1e-4, 10e-3))
    assert found.verdict == verdict and measure_of in found.text


def test_a_measure_that_leaves_it_open_refutes_no_link() -> None:
    calls = itertools.count()

    def seconds(rank: int, peer: int) -> tuple[float, float]:
        # Every second block is slow; of each, rank 0 asks for two times, and its figures count.
        disturbed = (rank, peer) == (0, 1) and next(calls) // 2 % 2
        return 1e-4, 30e-3 if disturbed else 9e-3 if {rank, peer} == {0, 1} else 10e-3

    assert link_verdict((0, 1), "aaa", seconds).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected identity"),
        ("[1]", "expected identity"),
        ('{"identity": "a", "what": "compute", "ranks": [0, 1, 2]}', "every rank suspected"),
        ('{"identity": "a", "what": "compute", "ranks": [3]}', "expected different ones of 0 to 2"),
        ('{"identity": "a", "what": "compute", "ranks": [1, 1]}', "expected different ones"),
        ('{"identity": "a", "what": "link", "ranks": [1]}', "expected its two ends"),
        ('{"identity": "a", "what": "disk", "ranks": [1]}', "expected compute or link"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anybody_waits(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        request_from(text, 3)


def test_a_link_of_two_ranks_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(ConfigError, match="expected a third one"):
        request_from('{"identity": "a", "what": "link", "ranks": [0, 1]}', 2)
    assert request_from(COMPUTE.to_json(), 2) == COMPUTE


@functools.cache
def measured() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_ranks(
        3, "tests.scan.respond.live_ranks:measured", timeout=240, env={"TORCH_FR_BUFFER_SIZE": "100"}
    )
    return found


def test_the_rank_with_more_work_is_confirmed_and_no_other() -> None:
    for found in measured():
        assert found["compute 1"]["verdict"] == "confirmed" and found["compute 1"]["ratio"] > 1.5
        assert found["compute 0"]["verdict"] == "refuted" and found["compute 0"]["ratio"] < 1.0
        assert found["compute 1"]["text"] == measured()[0]["compute 1"]["text"], "one result on all ranks"


def test_the_link_with_a_wait_in_it_is_confirmed_and_no_other() -> None:
    for found in measured():
        assert found["link 0 2"]["verdict"] == "confirmed"
        assert found["link 0 1"]["verdict"] == "refuted"


def test_the_selftest_measures_all_ranks_and_pairs() -> None:
    for found in measured():
        products = found["selftest"]["rates"]["products"]
        assert products[1] == min(products), (
            "who works more has the lowest rate; whom to name is tested alone"
        )
        assert [(link["first"], link["second"]) for link in found["selftest"]["links"]] == [
            (1, 2),
            (0, 2),
            (0, 1),
        ]
        assert all(min(rates) > 0 for rates in found["selftest"]["rates"].values())


def test_a_rank_that_waits_says_in_which_collective() -> None:
    waits, computes, _ = (found["evidence"] for found in measured())
    assert any("all_reduce" in frame for frame in waits["stacks"]["MainThread"])
    assert [each["op"] for each in waits["waiting"]] == ["gloo:all_reduce"] or not waits["waiting"]
    assert not any("all_reduce" in frame for frame in computes["stacks"]["MainThread"])


def test_skewed_routers_send_more_tokens_to_the_rank_and_recover() -> None:
    for found in measured():
        before, during, after = found["tokens"]
        assert during[2] == max(during) > before[2] and sum(during) == sum(before)
        assert after == before


def test_every_session_numbers_collectives_alike_on_all_ranks() -> None:
    """Ranks that listened for themselves before, and one that listened on in between, are no exception."""
    first, second, third = zip(*(found["numbers"] for found in measured()), strict=True)
    assert first == second == ([0, 1, 2], [0, 1, 2], [0, 1, 2])
    # The control: a rank that has another session open keeps its numbers, and then nobody begins anew.
    assert len({tuple(numbers) for numbers in third}) > 1
