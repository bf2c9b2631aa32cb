"""What a traced run says of its pipelines: the order of their computations, times of stages, delays of links.

It calibrates the pipeline simulator (``mt_megatron.pipeline.simulate``): with these costs the schedule that
the run used can be simulated, compared with what was measured, and compared with other schedules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ConfigError, ScanError
from mt_megatron.pipeline.actions import Action, Kind, Placement, Schedule, Style
from mt_megatron.pipeline.generate.catalogue import NAMES, V_SHAPED, generate
from mt_megatron.pipeline.simulate.costs import PERFECT, Costs, Link
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

_MOST_SAMPLES = 40
"""Steps whose costs are kept one by one, spread over the run."""

_SHARED_QUANTILE = 0.05
"""Of transfers whose end is that of a whole call; the end of most such calls is another transfer's."""

ASSUMED_WEIGHT_SHARE = 0.5
"""Part of a backward that is weight gradients where the run computed them together: as many operations as
the gradients of the inputs, attention aside."""

Calls = Literal["blocking", "overlapping", "asynchronous"]
"""Megatron-Core's exchanges, the same with ``overlap_p2p_comm``, or transfers whose sends go on alone."""

_Key = tuple[Kind, int, int]
"""Kind, chunk and micro-batch of a computation on one rank."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPipeline:
    """One pipeline of a run: ranks of equal data, tensor and context parallel coordinates."""

    ranks: tuple[int, ...]
    """Global ranks, first stage first."""

    schedule: Schedule
    """The order of most steps, named like the generated schedule that it equals, else ``recorded``."""

    calls: Calls
    """How the ranks waited for transfers."""

    rendezvous: bool
    """Of asynchronous transfers whether they begin no sooner than a receive that is posted shortly before
    its computation; otherwise receivers always had room. Whichever is nearer to what was measured."""

    costs: Costs
    """Medians by stage; ``weight`` is assumed (``ASSUMED_WEIGHT_SHARE``) unless ``weight_measured``. Links
    that the run did not use are like the median one of those that it used."""

    samples: tuple[Costs, ...]
    """The costs of single steps, by stage and micro-batch: what varies makes a pipeline wait, which medians
    do not show."""

    weight_measured: bool
    steps: int
    """Steps that were looked at."""

    pipeline_seconds: float
    """From the begin of the first computation to the end of the last one, the median over the steps."""

    step_seconds: float
    """Whole steps, the median."""

    def seconds(self, program: Program, samples: Sequence[Costs] | None = None) -> float:
        """Simulated seconds of a step of ``program``, a schedule of this pipeline: the median of
        ``samples`` (its own)."""
        return float(np.median(program.makespans(self.samples if samples is None else samples)))

    def program(self, schedule: Schedule | None = None, calls: Calls | None = None) -> Program:
        """``schedule`` with ``calls``, by default the schedule as it was run. Raises ConfigError for calls of
        Megatron-Core in a schedule that it does not run."""
        schedule, calls = schedule or self.schedule, calls or self.calls
        if calls == "asynchronous":
            return Program(schedule, rendezvous=self.rendezvous)
        overlap = calls == "overlapping" and schedule.name == "interleaved"
        return Program(schedule, calls=upstream_calls(schedule, overlap=overlap))


@dataclass(frozen=True)
class _RankLog:
    """Computations of one rank by step, each with begin and end in ns on the common clock."""

    steps: dict[int, list[tuple[_Key, int, int]]]
    step_seconds: dict[int, float]
    gaps: Cover
    """Time in which the rank waited for communications, on the common clock."""

    asynchronous: bool
    waits_for_sends: bool
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
    calls: Calls = "asynchronous"
    if schedule.name in ("1f1b", "interleaved") and not any(log.asynchronous for log in logs):
        calls = "blocking"
    elif schedule.name == "interleaved" and any(log.waits_for_sends for log in logs):
        calls = "overlapping"
    lasted = _lasted(logs, chosen, schedule)
    size = np.concatenate([log.bytes for log in logs])
    message = float(np.median(size)) if len(size) else 0.0
    begins = np.array([min(log.steps[step][0][1] for log in logs) for step in chosen])
    ends = np.array([max(each[2] for log in logs for each in log.steps[step]) for step in chosen])
    whole_steps = [np.median([log.step_seconds.get(step, np.nan) for log in logs]) for step in chosen]
    messages = _messages(exchanges, ranks)
    links, others = _links(messages, chosen, message)
    every = np.linspace(0, len(chosen) - 1, min(len(chosen), _MOST_SAMPLES)).astype(int)
    made = MeasuredPipeline(
        ranks=ranks,
        schedule=schedule,
        calls=calls,
        rendezvous=True,
        costs=_costs({kind: _medians(values) for kind, values in lasted.items()}, message, links),
        samples=tuple(
            _costs(
                {kind: values[number] for kind, values in lasted.items()},
                message,
                _of_step(messages, chosen[number], message, links, others),
            )
            for number in every.tolist()
        ),
        weight_measured=bool(schedule.splits_backward),
        steps=len(chosen),
        pipeline_seconds=float(np.median(ends - begins)) / 1e9,
        step_seconds=float(np.nanmedian(whole_steps)),
    )
    if calls == "asynchronous":
        eager = replace(made, rendezvous=False)
        made = min(made, eager, key=lambda each: abs(each.seconds(each.program()) - each.pipeline_seconds))
    return _settled(made, others)


def _of_step(
    messages: Sequence[_Messages],
    step: int,
    message: float,
    usual: Mapping[Edge, Link],
    uncertain: Mapping[Edge, Link],
) -> dict[Edge, Link]:
    """Links in one step; the usual ones where its transfers do not say."""
    found, shared = _links(messages, [step], message)
    return {**usual, **{e: link for e, link in found.items() if e not in shared and e not in uncertain}}


def _medians(values: Floats) -> Floats:
    """[stages, 1] of [steps, stages, micro-batches]."""
    found: Floats = np.median(values, axis=(0, 2))[:, None]
    return found


def _costs(lasted: Mapping[str, Floats], message: float, links: Mapping[Edge, Link]) -> Costs:
    return Costs(
        forward=lasted["forward"],
        backward=lasted["backward"],
        weight=lasted["weight"],
        input=lasted["input"],
        message=message,
        link=_median_link(links, message),
        links=links,
    )


def _median_link(links: Mapping[Edge, Link], message: float) -> Link:
    """That of ``links`` on which a message of so many bytes takes the median time, the upper one of two."""
    ordered = sorted(links.values(), key=lambda each: each.latency + message / each.bandwidth)
    return ordered[len(ordered) // 2] if ordered else PERFECT


def _settled(found: MeasuredPipeline, others: Mapping[Edge, Link]) -> MeasuredPipeline:
    """``found`` with those of the ``others`` in place of its links that bring the simulated step nearer to
    the measured one: transfers that share their calls are only bounded, from below and above."""
    program = found.program()

    def with_links(changed: Mapping[Edge, Link]) -> tuple[Costs, ...]:
        return tuple(_with_links(each, changed) for each in found.samples)

    links: dict[Edge, Link] = {}
    left = dict(others)
    missed = abs(found.seconds(program) - found.pipeline_seconds)
    while left:
        tried = [{**links, edge: link} for edge, link in left.items()]
        misses = [abs(found.seconds(program, with_links(each)) - found.pipeline_seconds) for each in tried]
        best = int(np.argmin(misses))
        if misses[best] >= missed:
            break
        links, missed = tried[best], misses[best]
        del left[list(left)[best]]
    return replace(found, costs=_with_links(found.costs, links), samples=with_links(links))


def _with_links(costs: Costs, changed: Mapping[Edge, Link]) -> Costs:
    links = {**costs.links, **changed}
    return replace(costs, links=links, link=_median_link(links, float(np.mean(costs.message))))


def _log(trace: RankTrace, to_reference: Any) -> _RankLog:
    spans = trace.spans[trace.spans["end"] != OPEN]
    kind = spans["kind"]
    steps: dict[int, list[tuple[_Key, int, int]]] = defaultdict(list)
    rows = spans[(kind == KIND["forward"]) | (kind == KIND["backward"])]
    rows = rows[np.argsort(rows["begin"], kind="stable")]
    timed = (rows["device_begin"] > 0) & (rows["device_end"] > 0)
    begin_times = to_reference(np.where(timed, rows["device_begin"], rows["begin"]).astype(np.int64))
    end_times = to_reference(np.where(timed, rows["device_end"], rows["end"]).astype(np.int64))
    seen: set[tuple[int, _Key]] = set()
    for row, begin, end in zip(rows, begin_times.tolist(), end_times.tolist(), strict=True):
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
    flags = transfers["flags"]
    asynchronous = bool(((flags & (ASYNC | WAIT)) != 0).any())
    is_send = np.isin(transfers["name"], [n for n, text in enumerate(trace.strings) if text == "send"])
    waits = (flags & WAIT) != 0
    waits_for_sends = 2 * int((is_send & waits).sum()) > int((is_send & ~waits).sum())
    # To begin a transfer in the background is the rank's own work, and so is a send that nobody waits for.
    begins_only = (flags & ASYNC) != 0
    if asynchronous and not waits_for_sends:
        begins_only |= is_send & ~waits
    apart = np.concatenate((transfers[~begins_only], spans[kind == KIND["collective"]]))
    sent = transfers["bytes"][transfers["bytes"] > 0].astype(np.float64)
    return _RankLog(
        steps=dict(steps),
        step_seconds=lasted,
        gaps=Cover(
            to_reference(apart["begin"].astype(np.int64)), to_reference(apart["end"].astype(np.int64))
        ),
        asynchronous=asynchronous,
        waits_for_sends=waits_for_sends,
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


def _lasted(logs: Sequence[_RankLog], chosen: Sequence[int], schedule: Schedule) -> dict[str, Floats]:
    """Seconds of ``forward``, whole ``backward``, ``input`` and ``weight`` gradients, each [steps, stages,
    micro-batches]. Each has what the rank does before it that is no communication. What the run did not
    compute is put together from what it did, or assumed (``ASSUMED_WEIGHT_SHARE``)."""
    placement = schedule.placement
    shape = len(chosen), placement.stages, schedule.microbatches
    found = {kind: np.full(shape, np.nan) for kind in (Kind.F, Kind.B, Kind.W)}
    for rank, log in enumerate(logs):
        for number, step in enumerate(chosen):
            own = log.steps[step]
            begins, ends = (np.array([each[at] for each in own], dtype=np.int64) for at in (1, 2))
            idle = (begins[1:] - ends[:-1]) - log.gaps.within(ends[:-1], begins[1:])
            work = (ends - begins) + np.maximum(0.0, np.concatenate(([0.0], idle)))
            for (key, _, _), nanoseconds in zip(own, work.tolist(), strict=True):
                found[key[0]][number, placement.stage(rank, key[1]), key[2]] = nanoseconds / 1e9
    split = ~np.isnan(found[Kind.W])
    weight = np.where(split, found[Kind.W], _weight_shares(found, split) * found[Kind.B])
    return {
        "forward": found[Kind.F],
        "backward": np.where(split, found[Kind.B] + found[Kind.W], found[Kind.B]),
        "input": np.where(split, found[Kind.B], found[Kind.B] - weight),
        "weight": weight,
    }


@dataclass(frozen=True)
class _Messages:
    """Transfers on one directed edge, in ns from when both sides are ready."""

    edge: Edge
    """By pipeline ranks."""

    step: NDArray[np.int64]
    arrives: Floats
    leaves: Floats
    """When the sender goes on."""

    alone: NDArray[np.bool_]
    """True where the receiver's call has nothing of other ranks, so that its end is the message's."""


def _messages(exchanges: Sequence[RankExchanges], ranks: tuple[int, ...]) -> list[_Messages]:
    place = {rank: index for index, rank in enumerate(ranks)}
    receives = {edge: log for each in exchanges for edge, log in each.receives.items()}
    calls = {each.rank: _partners(each) for each in exchanges}
    found = []
    for edge, send in ((edge, log) for each in exchanges for edge, log in each.sends.items()):
        if edge not in receives or not set(edge) <= set(ranks):
            continue
        both = edge_transfers(send, receives[edge], Labels())
        times = zip(both.receive_begin.tolist(), both.receive_end.tolist(), strict=True)
        alone = np.array([len(calls[edge[1]][each]) == 1 for each in times], dtype=bool)
        rows = both.waited
        found.append(
            _Messages(
                edge=(place[edge[0]], place[edge[1]]),
                step=both.iteration[rows],
                arrives=(both.receive_end - both.ready)[rows].astype(np.float64),
                leaves=(both.send_end - both.ready)[rows].astype(np.float64),
                alone=alone[rows],
            )
        )
    return found


def _weight_shares(found: Mapping[Kind, Floats], split: NDArray[np.bool_]) -> Floats:
    """Part of each stage's whole backward that is weight gradients, [stages, 1]: as in its micro-batches that
    the run split, else assumed."""
    shares = np.full((split.shape[1], 1), ASSUMED_WEIGHT_SHARE)
    for stage in np.flatnonzero(split.any(axis=(0, 2))).tolist():
        inputs, weights = (found[kind][:, stage][split[:, stage]] for kind in (Kind.B, Kind.W))
        shares[stage] = np.median(weights) / (np.median(weights) + np.median(inputs))
    return shares


def _links(
    messages: Sequence[_Messages], steps: Sequence[int], message: float
) -> tuple[dict[Edge, Link], dict[Edge, Link]]:
    """How long a message takes in ``steps``, at least; and for edges whose transfers always share their calls
    with others, how long at most. The time in which the sender is held counts as bandwidth, the rest as
    latency."""
    least: dict[Edge, Link] = {}
    most: dict[Edge, Link] = {}
    typical = np.median if len(steps) > 1 else np.mean
    for each in messages:
        rows = np.isin(each.step, list(steps))
        alone = rows & each.alone
        if alone.any():
            arrives, leaves = (float(typical(a[alone])) for a in (each.arrives, each.leaves))
            least[each.edge] = _link(arrives, leaves, message)
        elif rows.any():
            # The end of a call is that of its last transfer: the earliest of many ends is nearest.
            arrives, leaves = (
                float(np.quantile(a[rows], _SHARED_QUANTILE)) for a in (each.arrives, each.leaves)
            )
            least[each.edge] = _link(min(arrives, leaves), leaves, message)
            most[each.edge] = _link(arrives, leaves, message)
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
