"""What a traced run says of its pipelines: the order of their computations, times of stages, delays of links.

It calibrates the pipeline simulator (``mt_megatron.pipeline.simulate``): with these costs the schedule that
the run used can be simulated, compared with what was measured, and compared with other schedules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mt_megatron.errors import ConfigError, ScanError
from mt_megatron.pipeline.actions import Action, Kind, Placement, Schedule, Style
from mt_megatron.pipeline.generate.catalogue import NAMES, V_SHAPED, generate
from mt_megatron.pipeline.simulate.costs import Costs, Link
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.pipeline.upstream import upstream_calls
from mt_megatron.pipeline.validate import validate
from mt_megatron.scan.format.records import ASYNC, KIND, OPEN, WAIT
from mt_megatron.scan.format.segments import RankTrace

from .intervals import Cover, Times
from .matched_ops import Edge, Labels, RankExchanges, edge_transfers
from .rank_operations import rank_exchanges
from .robust import Floats
from .trace import Trace

_WARM_UP_STEPS = 2
"""First steps that are left out where enough others are there: buffers and caches are made in them."""

_SHARED_QUANTILE = 0.05
"""Of transfers whose end is that of a whole call; the end of most such calls is another transfer's."""

ASSUMED_WEIGHT_SHARE = 0.5
"""Part of a backward that is weight gradients where the run computed them together: as many operations as
the gradients of the inputs, attention aside."""

_Key = tuple[Kind, int, int]
"""Kind, chunk and micro-batch of a computation on one rank."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPipeline:
    """One pipeline of a run: ranks of equal data, tensor and context parallel coordinates."""

    ranks: tuple[int, ...]
    """Global ranks, first stage first."""

    schedule: Schedule
    """The order of most steps, named like the generated schedule that it equals, else ``recorded``."""

    blocking: bool
    """Whether transfers were Megatron-Core's blocking exchanges."""

    costs: Costs
    """Medians; ``weight`` is assumed (``ASSUMED_WEIGHT_SHARE``) unless ``weight_measured``."""

    weight_measured: bool
    steps: int
    """Steps that were looked at."""

    pipeline_seconds: float
    """From the begin of the first computation to the end of the last one, the median over the steps."""

    step_seconds: float
    """Whole steps, the median."""

    def program(self) -> Program:
        """The schedule as it was run."""
        if self.blocking:
            return Program(self.schedule, calls=upstream_calls(self.schedule))
        return Program(self.schedule, rendezvous=True)


@dataclass(frozen=True)
class _RankLog:
    """Computations of one rank by step, each with begin and end in ns on the common clock."""

    steps: dict[int, list[tuple[_Key, int, int]]]
    step_seconds: dict[int, float]
    gaps: Cover
    """Time in communications, on the common clock."""

    asynchronous: bool
    bytes: Floats


def measured_pipelines(trace: Trace) -> list[MeasuredPipeline]:
    """Every pipeline of the run whose ranks left traces, by its first rank. Raises ``ScanError`` where there
    is none with forwards and backwards of a step."""
    rows: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    for rank, place in trace.places.items():
        rows[place.dp, place.cp, place.tp][place.pp] = rank
    found = []
    for row in rows.values():
        ranks = tuple(row[stage] for stage in sorted(row))
        if len(ranks) > 1 and not set(ranks) & set(trace.missing):
            found.append(_measured(trace, ranks))
    if not found:
        raise ScanError(
            f"{trace.files.root}: found no pipeline of several ranks; expected the trace of a run with "
            "--pipeline-model-parallel-size above 1 in which every rank of a pipeline left its files"
        )
    return sorted(found, key=lambda each: each.ranks)


def _measured(trace: Trace, ranks: tuple[int, ...]) -> MeasuredPipeline:
    logs, exchanges = [], []
    for rank in ranks:
        recorded = trace.rank(rank)

        def to_reference(times: Times, rank: int = rank) -> Times:
            return trace.clocks.to_reference(rank, times)

        logs.append(_log(recorded, to_reference))
        exchanges.append(rank_exchanges(rank, recorded, to_reference))
    chosen, orders = _steps(logs, trace, ranks)
    schedule = _schedule(orders, trace, ranks)
    blocking = not any(log.asynchronous for log in logs) and schedule.name in ("1f1b", "interleaved")
    seconds = _seconds(logs, chosen, schedule.placement)
    size = np.concatenate([log.bytes for log in logs])
    message = float(np.median(size)) if len(size) else 0.0
    stages = schedule.placement.stages
    measured = {kind: [seconds.get((kind, stage)) for stage in range(stages)] for kind in (Kind.B, Kind.W)}
    weight_measured = all(value is not None for value in measured[Kind.W])
    inputs = [value or 0.0 for value in measured[Kind.B]]
    if weight_measured:
        weight = [value or 0.0 for value in measured[Kind.W]]
        whole = [one + other for one, other in zip(inputs, weight, strict=True)]
    else:
        whole, weight = inputs, [ASSUMED_WEIGHT_SHARE * value for value in inputs]
    begins = np.array([min(log.steps[step][0][1] for log in logs) for step in chosen])
    ends = np.array([max(each[2] for log in logs for each in log.steps[step]) for step in chosen])
    whole_steps = [np.median([log.step_seconds.get(step, np.nan) for log in logs]) for step in chosen]
    links, others = _links(exchanges, ranks, set(chosen), message)
    made = MeasuredPipeline(
        ranks=ranks,
        schedule=schedule,
        blocking=blocking,
        costs=Costs(
            forward=[seconds[Kind.F, stage] for stage in range(stages)],
            backward=whole,
            weight=weight,
            message=message,
            links=links,
        ),
        weight_measured=weight_measured,
        steps=len(chosen),
        pipeline_seconds=float(np.median(ends - begins)) / 1e9,
        step_seconds=float(np.nanmedian(whole_steps)),
    )
    return _settled(made, others)


def _settled(found: MeasuredPipeline, others: Mapping[Edge, Link]) -> MeasuredPipeline:
    """``found`` with those of the ``others`` in place of its links that bring the simulated step nearer to
    the measured one: transfers that share their calls are only bounded, from below and above."""
    program, costs = found.program(), found.costs
    missed = abs(program.makespan(costs) - found.pipeline_seconds)
    left = dict(others)
    while left:
        tried = [replace(costs, links={**costs.links, edge: link}) for edge, link in left.items()]
        misses = np.abs(program.makespans(tried) - found.pipeline_seconds)
        best = int(misses.argmin())
        if misses[best] >= missed:
            break
        costs, missed = tried[best], float(misses[best])
        del left[list(left)[best]]
    return replace(found, costs=costs)


def _log(trace: RankTrace, to_reference: Any) -> _RankLog:
    spans = trace.spans[trace.spans["end"] != OPEN]
    kind = spans["kind"]
    steps: dict[int, list[tuple[_Key, int, int]]] = defaultdict(list)
    rows = spans[(kind == KIND["forward"]) | (kind == KIND["backward"])]
    rows = rows[np.argsort(rows["begin"], kind="stable")]
    timed = (rows["device_begin"] > 0) & (rows["device_end"] > 0)
    begins = to_reference(np.where(timed, rows["device_begin"], rows["begin"]).astype(np.int64))
    ends = to_reference(np.where(timed, rows["device_end"], rows["end"]).astype(np.int64))
    seen: set[tuple[int, _Key]] = set()
    for row, begin, end in zip(rows, begins.tolist(), ends.tolist(), strict=True):
        what = Kind.F if row["kind"] == KIND["forward"] else Kind.B
        step, key = int(row["iteration"]), (what, max(0, int(row["chunk"])), int(row["microbatch"]))
        # A second backward of the same micro-batch computes the weight gradients that the first left.
        if what is Kind.B and (step, key) in seen:
            key = (Kind.W, *key[1:])
        seen.add((step, key))
        steps[step].append((key, begin, end))
    whole = spans[kind == KIND["step"]]
    lasted = {int(row["iteration"]): float(row["end"] - row["begin"]) / 1e9 for row in whole}
    transfers = spans[kind == KIND["p2p"]]
    apart = spans[(kind == KIND["p2p"]) | (kind == KIND["collective"])]
    sent = transfers["bytes"][transfers["bytes"] > 0].astype(np.float64)
    return _RankLog(
        steps=dict(steps),
        step_seconds=lasted,
        gaps=Cover(
            to_reference(apart["begin"].astype(np.int64)), to_reference(apart["end"].astype(np.int64))
        ),
        asynchronous=bool(((transfers["flags"] & (ASYNC | WAIT)) != 0).any()),
        bytes=sent,
    )


def _steps(
    logs: Sequence[_RankLog], trace: Trace, ranks: tuple[int, ...]
) -> tuple[list[int], list[tuple[_Key, ...]]]:
    """Training steps that all ranks recorded whole, in the order that most of them had, and that order by
    rank."""
    orders: dict[int, tuple[tuple[_Key, ...], ...]] = {}
    for step in set.intersection(*(set(log.steps) for log in logs)):
        order = tuple(tuple(each[0] for each in log.steps[step]) for log in logs)
        kinds = Counter(key[0] for own in order for key in own)
        named = all(key[2] >= 0 for own in order for key in own)
        if named and kinds[Kind.F] == kinds[Kind.B] > 0:
            orders[step] = order
    if not orders:
        raise ScanError(
            f"{trace.files.root}: found no step in which ranks {', '.join(map(str, ranks))} recorded forward "
            "and backward of numbered micro-batches; expected a trace at level base or higher"
        )
    usual = Counter(orders.values()).most_common(1)[0][0]
    chosen = sorted(step for step, order in orders.items() if order == usual)
    if len(chosen) > 2 * _WARM_UP_STEPS:
        chosen = chosen[_WARM_UP_STEPS:]
    return chosen, list(usual)


def _schedule(orders: Sequence[tuple[_Key, ...]], trace: Trace, ranks: tuple[int, ...]) -> Schedule:
    chunks = 1 + max(key[1] for own in orders for key in own)
    microbatches = 1 + max(key[2] for own in orders for key in own)
    problems: list[str] = []
    for style in (Style.LOOP, Style.V) if chunks == 2 else (Style.LOOP,):
        placement = Placement(len(orders), chunks, style)
        actions = tuple(
            tuple(Action(kind, placement.stage(rank, chunk), batch) for kind, chunk, batch in own)
            for rank, own in enumerate(orders)
        )
        found = Schedule("recorded", placement, microbatches, actions)
        # An order that the other placement could not have run is how a V shows.
        if not (problems := validate(found)):
            return _named(found)
    raise ScanError(
        f"{trace.files.root}: the order in which ranks {', '.join(map(str, ranks))} computed is no schedule "
        f"of a pipeline ({problems[0]}); expected the steps of one pipeline"
    )


def _named(schedule: Schedule) -> Schedule:
    placement = schedule.placement
    for name in NAMES:
        if (placement.style is Style.V) != (name in V_SHAPED):
            continue
        try:
            made = generate(
                name, ranks=placement.ranks, chunks=placement.chunks, microbatches=schedule.microbatches
            )
        except ConfigError:
            continue  # Not of these sizes.
        if made.ranks == schedule.ranks:
            return made
    return schedule


def _seconds(
    logs: Sequence[_RankLog], chosen: Sequence[int], placement: Placement
) -> dict[tuple[Kind, int], float]:
    """Seconds of each kind of computation on each stage: the median of it and of what the rank does before
    it that is no communication."""
    found: dict[tuple[Kind, int], float] = {}
    for rank, log in enumerate(logs):
        lasted: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        before: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for step in chosen:
            own = log.steps[step]
            begins, ends = (np.array([each[at] for each in own], dtype=np.int64) for at in (1, 2))
            idle = (begins[1:] - ends[:-1]) - log.gaps.within(ends[:-1], begins[1:])
            for (key, begin, end), gap in zip(own, [np.nan, *idle.tolist()], strict=True):
                what = key[0], placement.stage(rank, key[1])
                lasted[what].append(end - begin)
                before[what].append(gap)
        for what, values in lasted.items():
            known = [gap for gap in before[what] if gap == gap]
            found[what] = float(np.median(values) + (np.median(known) if known else 0.0)) / 1e9
    return found


def _links(
    exchanges: Sequence[RankExchanges], ranks: tuple[int, ...], steps: set[int], message: float
) -> tuple[dict[Edge, Link], dict[Edge, Link]]:
    """By pipeline ranks: how long a message takes once both sides are ready, at least; and for edges whose
    transfers always share their calls with others, how long at most. The time in which the sender is held
    counts as bandwidth, the rest as latency."""
    place = {rank: index for index, rank in enumerate(ranks)}
    receives = {edge: log for each in exchanges for edge, log in each.receives.items()}
    calls = {each.rank: _partners(each) for each in exchanges}
    least: dict[Edge, Link] = {}
    most: dict[Edge, Link] = {}
    for edge, send in ((edge, log) for each in exchanges for edge, log in each.sends.items()):
        if edge not in receives or not set(edge) <= set(ranks):
            continue
        both = edge_transfers(send, receives[edge], Labels())
        rows = np.isin(both.iteration, list(steps)) & both.waited
        times = zip(both.receive_begin.tolist(), both.receive_end.tolist(), strict=True)
        alone = rows & np.array([len(calls[edge[1]][each]) == 1 for each in times], dtype=bool)
        arrives, leaves = both.receive_end - both.ready, both.send_end - both.ready
        between = place[edge[0]], place[edge[1]]
        if alone.any():
            least[between] = _link(np.median(arrives[alone]), np.median(leaves[alone]), message)
        elif rows.any():
            # The end of a call is that of its last transfer: the earliest of many ends is nearest.
            received, sent = (np.quantile(each[rows], _SHARED_QUANTILE) for each in (arrives, leaves))
            least[between] = _link(min(received, sent), sent, message)
            most[between] = _link(received, sent, message)
    return least, most


def _partners(exchanges: RankExchanges) -> dict[tuple[int, int], set[int]]:
    """By begin and end of a rank's calls: the ranks with which it exchanged something in them."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for edge, log in (*exchanges.sends.items(), *exchanges.receives.items()):
        other = edge[1] if edge[0] == exchanges.rank else edge[0]
        for times in zip(log.begin.tolist(), log.end.tolist(), strict=True):
            found[times].add(other)
    return found


def _link(arrives: float, leaves: float, message: float) -> Link:
    """A link on which a message of ``message`` bytes leaves after so many ns and arrives after so many."""
    arrives = max(0.0, float(arrives)) / 1e9
    leaves = min(arrives, max(0.0, float(leaves)) / 1e9)
    return Link(arrives - leaves, message / leaves if message and leaves else float("inf"))


def slowest(pipelines: Iterable[MeasuredPipeline]) -> MeasuredPipeline:
    """The pipeline that the others wait for at the end of a step."""
    return max(pipelines, key=lambda each: each.pipeline_seconds)
