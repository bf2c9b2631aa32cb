"""Slow transfers: which pair, which node, or only which group; hand-made times of exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mt_megatron.scan.analysis.matched_ops import Rows, Samples
from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.analysis.units import Unit
from mt_megatron.scan.diagnose.hops.ring_patterns import WAYS, Way, fit_pairs, fit_ring, ring_exits, rounds
from mt_megatron.scan.diagnose.hops.slow_rings import slow_rings
from mt_megatron.scan.diagnose.late_arrival.stages import above_past
from mt_megatron.scan.diagnose.slow_transfer.links import slow_links
from mt_megatron.scan.diagnose.slow_transfer.slow_units import slow_units
from mt_megatron.scan.findings.finding import Finding

from .step_tables import MS, heavy_tailed, table

STEPS = 40
LABELS = [("all_reduce", 40), ("all_to_all", 40)]


def unit(
    name: str, ranks: Sequence[int], times_ms: np.ndarray | float, *, edge: bool = False, seed: int = 0
) -> Unit:
    noise = heavy_tailed((STEPS,), seed + 17 * sum(ranks), deviation=0.1)
    rows = Rows(
        iteration=np.arange(1, STEPS + 1),
        label=np.zeros(STEPS, dtype=np.int64),
        count=np.full(STEPS, 8),
        time=np.broadcast_to(np.asarray(times_ms, dtype=np.float64), (STEPS,)) * MS * noise,
    )
    return Unit(
        name=name, ranks=tuple(ranks), is_edge=edge, crosses=False, rows=rows, samples=None, clock_error=0.0
    )


def ring(
    ranks: Sequence[int],
    *,
    slow: int | Sequence[int] | None = None,
    extra_ms: float = 3.0,
    way: Way = "rendezvous",
    op: int = 0,
    name: str = "dp",
    hop_ms: Sequence[float] | float = 0.5,
) -> Unit:
    """A unit with single operations; ``slow``: senders of slow hops, by position; ``hop_ms``: to a member."""
    rng = np.random.default_rng(3)
    members = len(ranks)
    arrival = -np.abs(rng.standard_normal((2 * STEPS, members))) * 0.3 * MS
    arrival -= arrival.max(axis=1, keepdims=True)
    extra = np.zeros(members)
    if slow is not None:
        extra[(np.atleast_1d(slow) + 1) % members] = extra_ms * MS
    number = rounds(LABELS[op][0], members)
    exits = ring_exits(arrival, np.asarray(hop_ms) * MS, extra, number, way)
    exits += 0.02 * MS * rng.standard_normal(exits.shape)
    samples = Samples(
        iteration=np.repeat(np.arange(1, STEPS + 1), 2),
        label=np.full(2 * STEPS, op),
        arrival=arrival.astype(np.float32),
        exit=exits.astype(np.float32),
    )
    whole = np.median(exits.max(axis=1)) / MS
    made = unit(name, ranks, whole)
    return Unit(
        name=name,
        ranks=tuple(ranks),
        is_edge=False,
        crosses=False,
        rows=made.rows,
        samples=samples,
        clock_error=0.0,
    )


def judge(units: list[Unit], steps: StepTable) -> list[Finding]:
    slow = slow_units(units, steps.iteration, steps.step_ns)
    known = {id(each.unit) for each in slow}
    slow += slow_rings(units, known, steps.iteration, steps.step_ns, LABELS, steps.places)
    return slow_links(slow, units, steps, LABELS)


def test_equal_links_are_fine() -> None:
    units = [unit("tp", (rank, rank + 1), 1.0, seed=rank) for rank in range(0, 16, 2)]
    units += [unit("pp", (rank, rank + 8), 2.0, edge=True, seed=rank) for rank in range(8)]
    assert judge(units, table(dp=4, tp=2, pp=2)) == []


@pytest.mark.parametrize("first", [0, 20])
def test_names_the_pair_of_a_slow_edge(first: int) -> None:
    times = np.where(np.arange(STEPS) >= first, 4.0, 1.0)
    units = [unit("pp", (rank, rank + 2), 1.0, edge=True, seed=rank) for rank in range(1, 8)]
    units.append(unit("pp", (0, 2), times, edge=True))
    (found,) = judge(units, table(dp=2, pp=5))
    assert (found.cause, found.ranks, found.lateness) == ("slow_link", (0, 2), "slow_transfer")
    assert abs(found.first_step - (first + 1)) <= 2
    assert found.confidence > 0.8


def test_both_directions_are_one_link() -> None:
    units = [unit("pp", (a, a + 2), 1.0, edge=True, seed=a) for a in range(1, 6)]
    units += [unit("pp", (a + 2, a), 1.0, edge=True, seed=a) for a in range(1, 6)]
    units += [unit("pp", (0, 2), 4.0, edge=True), unit("pp", (2, 0), 4.0, edge=True)]
    (found,) = judge(units, table(dp=2, pp=4))
    assert found.ranks == (0, 2)
    assert found.details["directions"] == [[0, 2], [2, 0]]


def test_alone_a_link_is_judged_by_its_past_only() -> None:
    assert judge([unit("tp", (0, 1), 6.0)], table(dp=1, tp=2)) == []
    times = np.where(np.arange(STEPS) >= 15, 6.0, 1.0)
    (found,) = judge([unit("tp", (0, 1), times)], table(dp=1, tp=2))
    assert found.ranks == (0, 1) and abs(found.first_step - 16) <= 2


@pytest.mark.parametrize("members", [3, 4, 8])
@pytest.mark.parametrize("way", WAYS)
def test_the_pattern_of_exits_names_the_hop(way: Way, members: int) -> None:
    for sender in (0, members - 2):
        made = ring(range(members), slow=sender, way=way)
        assert made.samples is not None
        healthy = 0.5 * MS * rounds("all_reduce", members)
        fit = fit_ring(made.samples, LABELS, healthy)
        assert fit is not None
        if fit.accepted:
            assert fit.hops == (sender,)
        else:
            # Few members and messages that overlap leave hardly a trace: then nobody is named.
            assert way == "late" or members == 3


def test_a_slow_hop_in_a_ring_is_a_link_and_a_slow_ring_is_a_group() -> None:
    sound = [ring(range(4 * at, 4 * at + 4)) for at in range(1, 4)]
    (found,) = judge([*sound, ring(range(4), slow=1)], table(dp=16))
    assert (found.cause, found.ranks) == ("slow_link", (1, 2))
    whole = [ring(range(4))]
    rows = whole[0].rows
    slow = Unit(
        name="dp",
        ranks=(0, 1, 2, 3),
        is_edge=False,
        crosses=False,
        rows=Rows(iteration=rows.iteration, label=rows.label, count=rows.count, time=4 * rows.time),
        samples=None,
        clock_error=0.0,
    )
    (found,) = judge([*sound, slow], table(dp=16))
    assert (found.cause, found.ranks) == ("slow_group", (0, 1, 2, 3))
    assert found.confidence < 0.85


def test_a_ring_alone_tells_its_slow_hop_and_a_sound_one_nothing() -> None:
    assert judge([ring(range(4))], table(dp=4)) == []
    (found,) = judge([ring(range(4), slow=2)], table(dp=4))
    assert found.ranks == (2, 3)


@pytest.mark.parametrize("way", WAYS)
def test_a_ring_within_and_between_nodes_names_a_hop_only_if_it_is_one(way: Way) -> None:
    """Its hops differ when sound: the pattern of a ring that is slow as a whole looks like one hop's."""
    steps = table(dp=4, tp=4, host=lambda rank: rank // 8)
    mixed = [0.5, 0.1, 0.5, 0.1]
    sound = [ring(range(at, 16, 4), hop_ms=mixed, way=way) for at in (1, 2, 3)]
    whole = ring(range(0, 16, 4), hop_ms=mixed, way=way, slow=range(4))
    assert [(each.cause, each.ranks) for each in judge([*sound, whole], steps)] == [
        ("slow_group", (0, 4, 8, 12))
    ]
    for hop, pair in ((1, (4, 8)), (2, (8, 12))):
        one = ring(range(0, 16, 4), hop_ms=mixed, way=way, slow=hop)
        (found,) = judge([*sound, one], steps)
        assert (found.cause, found.ranks) in (("slow_link", pair), ("slow_group", (0, 4, 8, 12)))
        if way in ("rendezvous", "late"):
            assert found.ranks == pair


def test_gradients_are_only_scattered_where_parameters_are_gathered() -> None:
    """Half the rounds make another pattern: without knowing it the wrong hop may fit."""
    sharded = [("start_grad_sync", 40), ("start_param_sync", 40)]
    assert rounds("start_grad_sync", 8) == 14 and rounds("start_grad_sync", 8, sharded=True) == 7
    extra = np.zeros(8)
    extra[4] = 2.0 * MS
    arrival = np.zeros((12, 8))
    hop = np.array([0.5, 0.1] * 4) * MS
    noise = 0.02 * MS * np.random.default_rng(1).standard_normal((12, 8))
    samples = Samples(
        iteration=np.arange(12),
        label=np.zeros(12, dtype=np.int64),
        arrival=arrival.astype(np.float32),
        exit=(ring_exits(arrival, hop, extra, 7, "rendezvous") + noise).astype(np.float32),
    )
    fit = fit_ring(samples, sharded, 3.5 * MS, crossing=(1, 3, 5, 7))
    assert fit is not None and fit.accepted and fit.hops == (3,)
    other = fit_ring(samples, sharded[:1], 3.5 * MS, crossing=(1, 3, 5, 7))
    assert other is None or not other.accepted or other.explained < fit.explained


def test_more_operations_to_judge_are_no_slower_link() -> None:
    """How many transfers of an edge have ends of their own changes with what else its calls wait for."""
    units = [unit("pp", (0, 1), 1.0, edge=True)]
    many = units[0].rows
    count = np.where(np.arange(STEPS) < 20, 8, 2)
    units[0] = replace(units[0], rows=replace(many, count=count))
    assert judge(units, table(dp=1, pp=2)) == []
    units[0] = replace(units[0], rows=replace(many, time=many.time * np.where(np.arange(STEPS) < 20, 1, 4)))
    assert [each.ranks for each in judge(units, table(dp=1, pp=2))] == [(0, 1)]


def test_everything_across_one_nodes_border() -> None:
    steps = table(dp=2, pp=4, host=lambda rank: rank // 2)
    units = []
    for rank in range(6):
        slow = 2 <= rank < 6 and (rank // 2 == 1 or rank // 2 == 0)
        slow = slow or rank < 2
        units.append(unit("pp", (rank, rank + 2), 4.0 if slow else 1.0, edge=True, seed=rank))
    units += [unit("dp", (rank, rank + 1), 1.0, seed=rank) for rank in range(0, 8, 2)]
    (found,) = judge(units, steps)
    assert found.cause == "slow_node_link"
    assert found.ranks == (2, 3) and found.host == "host1"


def test_two_links_at_once() -> None:
    units = [unit("tp", (a, a + 1), 5.0 if a == 4 else 1.0, seed=a) for a in range(0, 16, 2)]
    units += [unit("pp", (a, a + 8), 9.0 if a == 1 else 2.0, edge=True, seed=a) for a in range(8)]
    found = judge(units, table(dp=4, tp=2, pp=2))
    assert sorted(each.ranks for each in found) == [(1, 9), (4, 5)]


def test_the_pair_that_leaves_an_all_to_all_late() -> None:
    exits = np.full((20, 4), 2.0 * MS) + 0.01 * MS * np.random.default_rng(0).standard_normal((20, 4))
    even = Samples(
        iteration=np.arange(20),
        label=np.ones(20, dtype=np.int64),
        arrival=np.zeros((20, 4), dtype=np.float32),
        exit=exits.astype(np.float32),
    )
    assert fit_pairs(even, 2.0 * MS) is None
    exits[:, [1, 3]] += 5.0 * MS
    late = Samples(
        iteration=even.iteration, label=even.label, arrival=even.arrival, exit=exits.astype(np.float32)
    )
    assert fit_pairs(late, 2.0 * MS) == (1, 3)
    for samples, expected in ((even, []), (late, [("slow_link", (1, 3))])):
        alone = replace(ring(range(4)), name="ep", samples=samples)
        alone = replace(alone, rows=replace(alone.rows, label=np.ones(STEPS, dtype=np.int64)))
        assert [(each.cause, each.ranks) for each in judge([alone], table(dp=4))] == expected


@pytest.mark.parametrize("extra_ms", [3.0, 0.45])
@pytest.mark.parametrize("way", WAYS)
def test_a_hop_is_told_beside_a_ring_that_lies_alike(way: Way, extra_ms: float) -> None:
    # The smaller one does not make the ring slow enough to stand out by its whole time.
    units = [ring(range(4), slow=1, way=way, extra_ms=extra_ms), ring(range(4, 8), way=way)]
    (found,) = judge(units, table(dp=8))
    assert (found.cause, found.ranks) == ("slow_link", (1, 2))


def test_rings_that_are_alike_and_sound_tell_nothing() -> None:
    units = [ring(range(at, at + 4), way="posted", hop_ms=0.5 + at / 200) for at in range(0, 16, 4)]
    assert judge(units, table(dp=16)) == []
    kept = [each.samples for each in units if each.samples is not None]
    left = [
        replace(each, samples=samples.take(samples.iteration < 0))
        for each, samples in zip(units, kept, strict=True)
    ]
    assert judge(left, table(dp=16)) == []


def test_a_group_made_of_slow_groups_is_the_one_that_is_slow() -> None:
    wide, narrow = [range(at, at + 6) for at in (0, 6, 12)], [range(at, at + 3) for at in range(0, 18, 3)]

    def judged(slow: Sequence[range]) -> list[tuple[int, ...]]:
        units = [unit("dp", each, 8.0 if each in slow else 1.0, seed=each[0]) for each in wide]
        units += [unit("ep", each, 8.0 if each in slow else 1.0, seed=each[0]) for each in narrow]
        return [each.ranks for each in judge(units, table(dp=18, host=lambda rank: 0))]

    assert judged([wide[0], narrow[0], narrow[1]]) == [tuple(wide[0])]
    assert judged([wide[0], narrow[0]]) == [tuple(narrow[0])]


def test_the_two_directions_of_the_only_link_are_no_measure_for_each_other() -> None:
    times = np.where(np.arange(STEPS) >= 20, 4.0, 1.0)
    units = [unit("pp", (0, 1), times, edge=True), unit("pp", (1, 0), times, edge=True, seed=5)]
    (found,) = judge(units, table(pp=2))
    assert (found.cause, found.ranks) == ("slow_link", (0, 1)) and found.confidence > 0.7


BUSY_PAST = (
    *(6.0, 0.2, 0.2, 0.3, 5.3, 0.3, 0.3, 2.1, 2.4, 3.7, 4.2, 5.7),
    *(5.6, 2.5, 0.4, 1.1, 0.3, 0.3, 0.4, 0.2, 1.6, 0.2, 1.8),
)
"""Milliseconds of transfers from rank 1 to rank 0 of a run under ``zb_h1`` beside other work, by step: no
healthy stretch without a break lasts a fifth of the run."""

SLOWED = (
    *(39.0, 34.2, 32.2, 35.3, 35.1, 34.6, 32.4, 41.8, 31.0, 20.9, 20.8, 37.2),
    *(30.5, 21.9, 39.0, 37.4, 35.9, 32.7, 29.4, 37.0, 21.8, 24.4, 31.0, 36.4),
    *(34.7, 20.5, 32.1, 32.3, 31.1, 33.3, 35.4, 26.9, 36.0, 35.4, 33.7, 36.4),
)
"""The steps after, each send and each receive 20 ms longer."""


@pytest.mark.parametrize("order", range(4))
def test_a_busy_time_in_the_past_hides_no_slow_link(order: int) -> None:
    draw = np.random.default_rng(order)
    past = np.array(BUSY_PAST)
    if order:
        past = draw.permutation(past)

    def edge(times: np.ndarray) -> Unit:
        number = len(times)
        rows = Rows(
            iteration=np.arange(1, number + 1),
            label=np.zeros(number, dtype=np.int64),
            count=np.full(number, 8),
            time=times * MS,
        )
        return replace(unit("pp", (1, 0), 1.0, edge=True), rows=rows)

    slowed = np.concatenate((past, SLOWED))
    (found,) = slow_units([edge(slowed)], np.arange(1, len(slowed) + 1), 660.0 * MS)
    assert found.first_step == len(past) + 1 and found.last_step == len(slowed)
    assert 20 * MS < found.extra_ns < 40 * MS and found.ratio > 5 and found.confidence > 0.9
    # Nothing but the busy times: no link is slow.
    healthy = np.concatenate((past, draw.permutation(past), draw.permutation(past)))
    assert slow_units([edge(healthy)], np.arange(1, len(healthy) + 1), 660.0 * MS) == []


def test_fast_bursts_do_not_make_the_rest_slow() -> None:
    draw = np.random.default_rng(3)
    healthy = draw.normal(0.0, 0.05, 100)
    assert above_past(healthy, least=0.3, tests=100) == []
    for start in (10, 35, 60, 85):
        healthy[start : start + 6] -= np.log(1.6)
    assert above_past(healthy, least=0.3, tests=100) == []
    slowed = healthy.copy()
    slowed[70:] += np.log(3.0)
    assert [each.start for each in above_past(slowed, least=0.5, tests=100)][:1] == [70]
