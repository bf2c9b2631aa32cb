"""Exchange of measured times: clocks differ, and the delay of a link is found all the same."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest

from mt_megatron.pipeline.actions import Kind, Placement, Schedule, matching_receive
from mt_megatron.pipeline.execute.step_times import RankTimes
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.policy.exchange import Vector, watched
from mt_megatron.pipeline.policy.situation import Measured
from mt_megatron.pipeline.simulate.costs import Costs, Link
from mt_megatron.pipeline.simulate.program import Program

SECOND = 1_000_000_000


def times_of(schedule: Schedule, costs: Costs, offsets: Mapping[int, int]) -> list[RankTimes]:
    """What each rank would have marked of a simulated step, on a clock that is ``offsets`` ahead."""
    timeline = Program(schedule).run(costs)
    found = []
    for rank in range(schedule.placement.ranks):
        at = offsets[rank]
        computed = {each.action: round((each.end - each.begin) * SECOND) for each in timeline.spans[rank]}
        sent, arrived = {}, {}
        for transfer in timeline.transfers:
            if transfer.edge[0] == rank:
                sent[transfer.action] = round(transfer.ready * SECOND) + at
            if transfer.edge[1] == rank and transfer.stalls > 1e-4:
                arrived[matching_receive(transfer.action)] = round(transfer.arrived * SECOND) + at
        seconds = round(timeline.makespan * SECOND)
        found.append(RankTimes(seconds=seconds, computed=computed, sent=sent, arrived=arrived))
    return found


def exchanged(schedule: Schedule, costs: Costs, offsets: Mapping[int, int]) -> Measured:
    vector = Vector(schedule, watched(Program(schedule), Costs(weight=1.0)), 1)
    packed = [vector.pack(times, rank, 0) for rank, times in enumerate(times_of(schedule, costs, offsets))]
    found = vector.unpack([sum(each) for each in zip(*packed, strict=True)], 4)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 2)])
def test_delays_do_not_depend_on_the_clocks(name: str, chunks: int) -> None:
    schedule = generate(name, ranks=4, chunks=chunks, microbatches=8)
    slow = {(1, 2): Link(0.4), (2, 1): Link(0.2)}
    costs = Costs(forward=1 / chunks, backward=2 / chunks, weight=1 / chunks, link=Link(0.05), links=slow)
    rng = random.Random(1)
    for _ in range(3):
        offsets = {rank: rng.randint(0, 10**12) for rank in range(4)}
        measured = exchanged(schedule, costs, offsets)
        for edge, time in measured.edges.items():
            # Half of the round trip: there and back differ on the slow link.
            expected = 0.3 if set(edge) == {1, 2} else 0.05
            assert time.delay == pytest.approx(expected, abs=1e-6), edge
        assert {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)} <= set(measured.edges)


def test_times_arrive_as_they_were() -> None:
    schedule = generate("zb_h1", ranks=3, microbatches=6)
    costs = Costs(forward=[1.0, 1.5, 2.0], backward=[2.0, 3.5, 4.0], weight=[0.5, 1.0, 1.5])
    found = exchanged(schedule, costs, dict.fromkeys(range(3), 0))
    assert found.step == 4
    assert found.forward == pytest.approx([1.0, 1.5, 2.0])
    assert found.input == pytest.approx([1.5, 2.5, 2.5])
    assert found.weight == pytest.approx([0.5, 1.0, 1.5])
    assert found.backward is not None and all(math.isnan(each) for each in found.backward)
    assert found.seconds == pytest.approx(Program(schedule).makespan(costs))
    assert found.memory is None


def test_a_wire_that_messages_queue_on_is_told_from_a_long_way() -> None:
    schedule = generate("breadth_first", ranks=2, microbatches=12)
    offsets = {0: 5 * SECOND, 1: 0}
    narrow = exchanged(schedule, Costs(weight=1.0, message=1.0, link=Link(0.0, 1 / 3.0)), offsets)
    assert narrow.edges[0, 1].wire == pytest.approx(3.0, rel=0.01)
    far = exchanged(schedule, Costs(weight=1.0, link=Link(3.0)), offsets)
    assert far.edges[0, 1].wire == 0.0 and far.edges[0, 1].delay == pytest.approx(3.0)


def test_of_several_pipelines_the_slowest_counts() -> None:
    schedule = generate("1f1b", ranks=2, microbatches=4)
    vector = Vector(schedule, watched(Program(schedule), Costs()), 2)
    total = [0] * len(vector)
    for pipeline, (forward, delay) in enumerate([(1.0, 0.5), (2.0, 0.1)]):
        costs = Costs(forward=forward, backward=2.0, link=Link(delay))
        for rank, times in enumerate(times_of(schedule, costs, {0: 0, 1: 77})):
            total = [a + b for a, b in zip(total, vector.pack(times, rank, pipeline), strict=True)]
    found = vector.unpack(total, 0)
    assert found is not None
    assert found.forward == pytest.approx([2.0, 2.0])
    assert found.edges[0, 1].delay == pytest.approx(0.5)


def test_a_rank_that_says_nothing_leaves_the_step_out() -> None:
    schedule = generate("1f1b", ranks=2, microbatches=4)
    vector = Vector(schedule, watched(Program(schedule), Costs()), 1)
    times = times_of(schedule, Costs(), {0: 0, 1: 0})
    assert vector.unpack(vector.pack(times[0], 0, 0), 0) is None


def test_memory_is_told_where_every_rank_knows_it() -> None:
    schedule = generate("1f1b", ranks=2, microbatches=4)
    vector = Vector(schedule, watched(Program(schedule), Costs()), 1)
    total = [0] * len(vector)
    for rank, times in enumerate(times_of(schedule, Costs(), {0: 0, 1: 0})):
        known = RankTimes(
            seconds=times.seconds, computed=times.computed, sent=times.sent, arrived=times.arrived,
            kept={rank: 100 + rank}, memory=1000 + rank, capacity=5000,
        )  # fmt: skip
        total = [a + b for a, b in zip(total, vector.pack(known, rank, 0), strict=True)]
    found = vector.unpack(total, 0)
    assert found is not None
    assert list(found.memory or ()) == [1000, 1001] and list(found.activation or ()) == [100, 101]
    assert list(found.capacity or ()) == [5000, 5000]


def test_few_messages_are_watched() -> None:
    schedule = generate("interleaved", ranks=8, chunks=2, microbatches=32)
    watch = watched(Program(schedule), Costs())
    assert all(1 <= len(sends) <= 3 for sends in watch.sends.values())
    assert all(send.kind in (Kind.SEND_F, Kind.SEND_B) for sends in watch.sends.values() for _, send in sends)
    assert len(watch.edges) == 2 * Placement(8, 2).ranks
    # What a rank adds to the sum over all ranks: a few hundred bytes.
    assert 8 * len(Vector(schedule, watch, 1)) / 8 < 400
