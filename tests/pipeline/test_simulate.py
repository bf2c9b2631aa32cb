"""The simulator of a training step against closed forms and against one that goes event by event."""

from __future__ import annotations

import math
import random
import timeit
from dataclasses import replace

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import (
    Action,
    Kind,
    Schedule,
    matching_receive,
    matching_send,
)
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.lowering import lowered
from mt_megatron.pipeline.simulate.costs import Costs, Link
from mt_megatron.pipeline.simulate.memory import activation_peaks, memory_peaks
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.pipeline.upstream import upstream_calls

from . import by_events
from .draws import drawn

SIZES = [(1, 1), (2, 2), (2, 8), (4, 4), (4, 7), (8, 8), (8, 32)]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 1.0), (0.7, 1.9)])
def test_1f1b_takes_ranks_less_one_micro_batches_more(
    ranks: int, microbatches: int, forward: float, backward: float
) -> None:
    timeline = Program(generate("1f1b", ranks=ranks, microbatches=microbatches)).run(
        Costs(forward=forward, backward=backward)
    )
    assert timeline.makespan == pytest.approx((microbatches + ranks - 1) * (forward + backward))
    assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 32)])
@pytest.mark.parametrize("name", ["interleaved", "depth_first"])
def test_interleaving_divides_the_bubble_by_the_chunks(
    name: str, ranks: int, chunks: int, microbatches: int
) -> None:
    forward, backward = 0.7, 1.9
    program = Program(generate(name, ranks=ranks, chunks=chunks, microbatches=microbatches))
    found = program.makespan(Costs(forward=forward / chunks, backward=backward / chunks))
    assert found == pytest.approx((microbatches + (ranks - 1) / chunks) * (forward + backward))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16), (8, 32)])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 2.0, 1.0), (1.0, 2.0, 0.8)])
def test_zb_h1_fills_the_drain_with_weight_gradients(
    ranks: int, microbatches: int, forward: float, backward: float, weight: float
) -> None:
    program = Program(generate("zb_h1", ranks=ranks, microbatches=microbatches))
    found = program.makespan(Costs(forward=forward, backward=backward, weight=weight))
    ideal = microbatches * (forward + backward)
    assert found == pytest.approx(ideal + (ranks - 1) * (forward + backward - 2 * weight))


def _random_costs(rng: random.Random, schedule: Schedule) -> Costs:
    stages, ranks = schedule.placement.stages, schedule.placement.ranks
    weight = [rng.uniform(0.1, 0.9) for _ in range(stages)]
    links = {
        (one, other): Link(rng.uniform(0, 2), rng.uniform(0.5, 4), rng.choice([None, 1, 2, 3]))
        for one in range(ranks)
        for other in range(ranks)
    }
    return Costs(
        forward=[rng.uniform(0.1, 2) for _ in range(stages)],
        backward=[each + rng.uniform(0.1, 2) for each in weight],
        weight=weight,
        message=[rng.uniform(0.1, 2) for _ in range(stages)],
        links=links,
    )


def test_equals_a_simulation_by_events() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        schedule, _ = drawn(rng, ranks=4, microbatches=8)
        costs = _random_costs(rng, schedule)
        expected = by_events.simulate(schedule, costs)
        program = Program(schedule)
        timeline = program.run(costs)
        found = {span.action: (span.begin, span.end) for spans in timeline.spans for span in spans}
        assert found.keys() == expected.keys()
        for action, times in expected.items():
            assert found[action] == pytest.approx(times), f"seed {seed}: {action}"
        end = max(end for _, end in expected.values())
        assert timeline.makespan == pytest.approx(end) == pytest.approx(program.makespan(costs))
        assert timeline.busy.sum() == pytest.approx(sum(end - begin for begin, end in expected.values()))


def test_many_costs_at_once_are_those_one_by_one() -> None:
    rng = random.Random(3)
    schedule = generate("depth_first", ranks=4, chunks=2, microbatches=8)
    costs = [_random_costs(rng, schedule) for _ in range(12)]
    for program in (Program(schedule), Program(schedule, rendezvous=True)):
        alone = [program.makespan(each) for each in costs]
        assert program.makespans(costs) == pytest.approx(alone)
        assert len(set(alone)) == 12


def test_list_scheduling_and_simulation_agree_on_times() -> None:
    """Delays of a link change which order is made; the order's simulated time is the one it was made by, so
    no other order of the same kind that ignores the link is faster."""
    slow = Costs(forward=1.0, backward=2.0, links={(1, 2): Link(latency=2.0), (2, 1): Link(latency=2.0)})
    aware = generate("memory_capped", ranks=4, microbatches=16, cap=6, costs=slow)
    unaware = generate("memory_capped", ranks=4, microbatches=16, cap=6)
    plain = generate("1f1b", ranks=4, microbatches=16)
    seconds = [Program(each).makespan(slow) for each in (aware, unaware, plain)]
    assert seconds[0] <= seconds[1] <= seconds[2] and seconds[0] < 0.9 * seconds[2]


def test_slack_is_what_a_transfer_may_take_longer() -> None:
    schedule = generate("interleaved", ranks=3, chunks=2, microbatches=6)
    program = Program(schedule)
    costs = Costs(forward=[1, 1.2, 1, 1, 0.9, 1.1], backward=2.0, message=1.0, link=Link(0.1, 5.0))
    timeline = program.run(costs)
    moved = 0
    for transfer in timeline.transfers:
        # The message of one stage and micro-batch grows; its gradient's grows with it, so leave that out.
        if transfer.action.kind is not Kind.SEND_B or transfer.action.stage == 0:
            continue
        node = program.node_of[transfer.action]
        for extra, longer in ((0.99 * transfer.slack, False), (transfer.slack + 0.01, True)):
            durations, lags, windows = program._prepared(costs)
            durations[node] += extra
            ends = program._ends(durations, lags, windows)
            assert (max(ends) > timeline.makespan + 1e-9) == longer
        moved += transfer.slack > 0
    assert moved > 5


def test_waiting_is_laid_at_the_edge_that_is_slow() -> None:
    program = Program(generate("1f1b", ranks=4, microbatches=8))
    costs = Costs(link=Link(latency=0.01), links={(2, 1): Link(latency=1.5)})
    lost = program.edge_costs(costs)
    assert set(lost) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert lost[2, 1] > 1.5 and all(0 <= each <= 0.1 for edge, each in lost.items() if edge != (2, 1))
    timeline = program.run(replace(costs, link=Link()))
    edges = {
        timeline.program.edges[timeline.program.node_edges[node]]
        for node in timeline.critical
        if timeline.program.node_edges[node] >= 0
    }
    assert (2, 1) in edges
    # The chain has no gap: each begins when the one before has ended, and arrived.
    ends = [0.0, *(timeline.ends[node] for node in timeline.critical)]
    for before, node in zip(ends, timeline.critical, strict=False):
        assert timeline.begins[node] - before in (pytest.approx(0.0), pytest.approx(1.5))


def test_reductions_run_beside_the_pipeline() -> None:
    broad = generate("breadth_first", ranks=2, chunks=2, microbatches=4)
    deep = generate("interleaved", ranks=2, chunks=2, microbatches=4)
    costs = Costs(forward=1.0, backward=2.0, reduction=3.0)
    early, late = Program(broad).run(costs), Program(broad, reduce_early=False).run(costs)
    assert late.makespan == pytest.approx(early.makespan + 3.0)
    assert early.makespan == pytest.approx(Program(broad).makespan(Costs(forward=1.0, backward=2.0)) + 3.0)
    first = {each.stage: each for each in early.reductions}
    assert first[2].slack == pytest.approx(8.0 - 3.0)  # The whole backward of the other chunk.
    other = {each.stage: each for each in Program(deep).run(costs).reductions}
    assert other[2].slack < first[2].slack


def test_traffic_adds_up_to_the_bytes_sent() -> None:
    schedule = generate("interleaved", ranks=3, chunks=2, microbatches=6)
    for bandwidth in (4.0, math.inf):
        timeline = Program(schedule).run(Costs(message=2.0, link=Link(0.1, bandwidth)))
        bounds, rates = timeline.traffic(50)
        assert len(bounds) == 51
        for edge, rate in rates.items():
            sent = sum(each.bytes for each in timeline.transfers if each.edge == edge)
            assert rate.sum() * (bounds[1] - bounds[0]) == pytest.approx(sent)
            assert bandwidth == math.inf or rate.max() <= bandwidth + 1e-9


def test_a_receive_that_is_posted_late_delays_its_transfer() -> None:
    schedule = lowered(generate("1f1b", ranks=2, microbatches=4))
    late = tuple(
        a
        for action in schedule.ranks[0]
        if action.kind is not Kind.RECV_B
        for a in ((Action(Kind.RECV_B, 0, action.microbatch), action) if action.kind is Kind.B else (action,))
    )
    changed = replace(schedule, ranks=(late, schedule.ranks[1]))
    costs = Costs(forward=1.0, backward=2.0, message=1.0, link=Link(latency=0.5, bandwidth=1.0))
    eager, strict = Program(changed).makespan(costs), Program(changed, rendezvous=True).makespan(costs)
    assert eager < strict
    assert Program(schedule, rendezvous=True).makespan(costs) < strict


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1.0, 2.0]), r"forward of shape \(2,\)"),
        (Costs(backward=-1.0), "finite numbers of at least 0"),
        (Costs(), "no time of its weight gradients"),
        (Costs(weight=3.0), "smaller than the whole"),
    ],
)
def test_impossible_costs_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Program(generate("zb_h1", ranks=4, microbatches=8)).makespan(costs)


def test_impossible_links_are_refused() -> None:
    for values in ((-1.0, 1.0, None), (0.0, 0.0, None), (math.inf, 1.0, None), (0.0, 1.0, 0)):
        with pytest.raises(ConfigError):
            Link(*values)


def test_memory_is_kept_until_the_weight_gradients() -> None:
    plain, split = (generate(name, ranks=4, microbatches=8) for name in ("1f1b", "zb_h1"))
    assert activation_peaks(plain) == (4, 3, 2, 1)
    assert activation_peaks(split) == (4, 4, 4, 4)
    costs = Costs(activation=10.0, weight_share=0.5, static=[100.0, 0.0, 0.0, 7.0])
    assert memory_peaks(plain, costs).tolist() == [140.0, 30.0, 20.0, 17.0]
    # Rank 3 holds one whole activation and the halves of three whose weight gradients are deferred.
    assert memory_peaks(split, costs).tolist() == [140.0, 35.0, 30.0, 32.0]


def test_a_large_step_is_simulated_in_less_than_5_ms() -> None:
    program = Program(generate("depth_first", ranks=8, chunks=2, microbatches=32))
    costs = Costs(message=1.0, link=Link(0.1, 10.0))
    best = min(timeit.repeat(lambda: program.makespan(costs), number=1, repeat=20))
    assert best < 0.005


def _blocking(schedule: Schedule, costs: Costs) -> float:
    """Seconds of a step in which every rank waits for its exchanges, call by call."""
    placement, calls = schedule.placement, upstream_calls(schedule)
    assert isinstance(costs.forward, list) and isinstance(costs.backward, list)
    at, now = [0] * placement.ranks, [0.0] * placement.ranks
    came: dict[Action, float] = {}
    free: dict[tuple[int, int], float] = {}
    left: dict[Action, tuple[float, float]] = {}

    def exchanged(rank: int, call: tuple[Action, ...]) -> float | None:
        """When ``rank`` goes on; None while another rank has not come."""
        sends = [each if each.kind.name.startswith("SEND") else matching_send(each) for each in call]
        for send in sends:
            if send in left:
                continue
            taker = matching_receive(send)
            if send not in came or taker not in came:
                return None
            edge = placement.rank(send.stage), placement.rank(taker.stage)
            link = costs.link_of(edge)
            word = costs.link_of((edge[1], edge[0])).latency  # That the receiver is there.
            begin = max(came[send], came[taker] + word, free.get(edge, 0.0))
            free[edge] = begin + 1.0 / link.bandwidth
            left[send] = free[edge], free[edge] + link.latency
        sides = zip(call, sends, strict=True)
        return max(now[rank], *(left[send][0 if each == send else 1] for each, send in sides))

    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(calls):
            if at[rank] == len(own):
                continue
            call = own[at[rank]]
            if isinstance(call, Action):
                seconds = costs.forward if call.kind is Kind.F else costs.backward
                now[rank] += seconds[call.stage]
            else:
                came.update(dict.fromkeys(call, now[rank]))
                over = exchanged(rank, call)
                if over is None:
                    continue
                now[rank] = over
            at[rank] += 1
            moved = True
    assert at == [len(own) for own in calls]
    return max(now)


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"),
    [(2, 1, 4), (4, 1, 6), (4, 1, 3), (2, 2, 4), (4, 2, 8), (4, 2, 4), (3, 3, 9)],
)
def test_upstream_s_blocking_exchanges(ranks: int, chunks: int, microbatches: int) -> None:
    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = generate(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    program = Program(schedule, calls=upstream_calls(schedule))
    stages = ranks * chunks
    even = Costs(forward=[1.0] * stages, backward=[2.0] * stages)
    assert program.makespan(even) == pytest.approx(3.0 * (microbatches * chunks + ranks - 1))
    rng = random.Random(ranks)
    for _ in range(5):
        costs = Costs(
            forward=[rng.uniform(0.5, 2) for _ in range(stages)],
            backward=[rng.uniform(0.5, 2) for _ in range(stages)],
            message=1.0,
            links={
                (one, other): Link(rng.uniform(0, 1), rng.uniform(0.5, 4))
                for one in range(ranks)
                for other in range(ranks)
            },
        )
        found = program.run(costs)
        assert found.makespan == pytest.approx(_blocking(schedule, costs))
        assert found.makespan > Program(schedule).makespan(costs)


def test_only_upstream_s_schedules_have_its_calls() -> None:
    for name, options in (("depth_first", {}), ("interleaved", {"group": 8})):
        with pytest.raises(ConfigError, match="as Megatron-Core runs them"):
            upstream_calls(generate(name, ranks=4, chunks=2, microbatches=8, **options))


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 8), (4, 2, 8), (4, 2, 4), (3, 3, 9)])
def test_overlapped_exchanges_wait_less_than_blocking_ones(
    ranks: int, chunks: int, microbatches: int
) -> None:
    schedule = generate("interleaved", ranks=ranks, chunks=chunks, microbatches=microbatches)
    overlapping = Program(schedule, calls=upstream_calls(schedule, overlap=True))
    even = Costs(forward=1.0, backward=2.0)
    assert overlapping.makespan(even) == pytest.approx(3.0 * (microbatches * chunks + ranks - 1))
    slow = Costs(forward=1.0, backward=2.0, message=1.0, link=Link(0.3, 2.0))
    blocking = Program(schedule, calls=upstream_calls(schedule))
    assert Program(schedule).makespan(slow) <= overlapping.makespan(slow) <= blocking.makespan(slow)
    if microbatches > ranks:
        assert overlapping.makespan(slow) < blocking.makespan(slow)
