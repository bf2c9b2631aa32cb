"""Schedules side by side under one set of costs: step, bubble, memory, and what they demand of the links.

Everything here is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..errors import ConfigError
from .actions import Placement, Schedule
from .generate.catalogue import generate
from .simulate.costs import PERFECT, Costs, Floats, per_stage
from .simulate.demands import Demands, demands
from .simulate.memory import activation_peaks, memory_peaks
from .simulate.program import Program
from .simulate.rerouted import rerouted_makespan
from .upstream import upstream_calls

MORE_THAN_1F1B = 2
"""Activations of a whole rank that memory_capped may keep beyond those of 1F1B."""

_LEAST_ACTIVATION = 1024.0
"""Bytes; the activations of no model are smaller."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule."""

    name: str
    chunks: int
    seconds: float
    """Of a step."""

    bubble: float
    """Part of the ranks' time in which they compute nothing."""

    against: float
    """Seconds over those of the first row; after the loss of a rank over those before it."""

    activations: float
    """What the rank that keeps most keeps, in micro-batches of a whole rank."""

    bytes: float
    """What the rank that needs most needs, activations and the rest; 0 where sizes are not known."""

    demands: Demands | None
    """None of rows that are no schedule of one pipeline."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def with_chunks(costs: Costs, placement: Placement, wanted: int) -> Costs:
    """``costs`` of ``placement`` as if every rank had ``wanted`` chunks: the model is cut anew, what a stage
    does being spread evenly over its layers. ``costs`` themselves where it has so many."""
    if placement.chunks == wanted:
        return costs
    stages = placement.ranks * wanted

    def spread(value: Any, name: str) -> Floats:
        columns = _columns(value, placement.stages, name).T
        at, cuts = np.linspace(0.0, placement.stages, stages + 1), np.arange(placement.stages + 1)
        sums = [np.interp(at, cuts, np.concatenate(([0.0], np.cumsum(column)))) for column in columns]
        parts: Floats = np.diff(np.array(sums), axis=1).T
        return parts

    return replace(
        costs,
        forward=spread(costs.forward, "forward"),
        backward=spread(costs.backward, "backward"),
        weight=None if costs.weight is None else spread(costs.weight, "weight"),
        input=None if costs.input is None else spread(costs.input, "input"),
        message=float(_columns(costs.message, placement.stages, "message").mean()),
        reduction=spread(costs.reduction, "reduction"),
        activation=spread(costs.activation, "activation"),
        static=spread(costs.static, "static"),
    )


def _columns(value: Any, stages: int, name: str) -> Floats:
    """[stages, micro-batches], or [stages, 1] where micro-batches are alike."""
    return per_stage(value, stages, np.shape(value)[1] if np.ndim(value) == 2 else 1, name)


def typical(program: Program, samples: Sequence[Costs]) -> Costs:
    """That of ``samples`` (the costs of single steps) with which the step of ``program`` is the median."""
    return samples[int(np.argsort(program.makespans(samples), kind="stable")[(len(samples) - 1) // 2])]


def row(program: Program, samples: Sequence[Costs], *, name: str | None = None) -> Row:
    """``program`` under the one of ``samples`` that is ``typical``; ``against`` is 1."""
    schedule, costs = program.schedule, typical(program, samples)
    timeline = program.run(costs)
    return Row(
        name=name or schedule.name,
        chunks=schedule.placement.chunks,
        seconds=timeline.makespan,
        bubble=timeline.bubble,
        against=1.0,
        activations=max(activation_peaks(schedule)) / schedule.placement.chunks,
        bytes=float(memory_peaks(schedule, costs).max()) if has_sizes(costs) else 0.0,
        demands=demands(program, costs),
    )


def has_sizes(costs: Costs) -> bool:
    """True where ``costs`` say how many bytes a stage keeps, rather than counting activations."""
    return float(np.max(costs.activation)) >= _LEAST_ACTIVATION


def compare(
    samples: Sequence[Costs],
    placement: Placement,
    microbatches: int,
    *,
    schedules: Sequence[Schedule] = (),
    replicas: int = 0,
) -> list[Row]:
    """Rows of Megatron-Core's 1F1B as it runs (blocking exchanges), of every generated schedule that has
    these sizes, each with asynchronous transfers, of ``schedules``, and with ``replicas`` of the pipeline
    after the loss of a rank. ``samples``: costs of ``placement``, of one step or of several, of which each
    row has the typical one. Schedules with several chunks have as many as the placement, or 2."""
    ranks, several = placement.ranks, placement.chunks if placement.chunks > 1 else 2
    its = {count: [with_chunks(each, placement, count) for each in samples] for count in (1, 2, several)}
    plain = generate("1f1b", ranks=ranks, microbatches=microbatches)
    blocking = Program(plain, calls=upstream_calls(plain))
    rows = [row(blocking, its[1], name="1f1b, blocking"), row(Program(plain), its[1])]
    one, many = typical(Program(plain), its[1]), its[several][0]
    for name, count, options in _wanted(placement, microbatches, several, one, many):
        try:
            made = generate(name, ranks=ranks, chunks=count, microbatches=microbatches, **options)
        except ConfigError:
            continue  # Not of these sizes; whoever asks for it by name hears why.
        rows.append(row(Program(made), its[count], name=_title(name, options)))
    for each in schedules:
        count = each.placement.chunks
        rows.append(row(Program(each), [with_chunks(sample, placement, count) for sample in samples]))
    rows = [replace(each, against=each.seconds / rows[0].seconds) for each in rows]
    return rows + (_lost(one, ranks, microbatches, replicas) if replicas > 1 else [])


def _wanted(
    placement: Placement, microbatches: int, several: int, one: Costs, many: Costs
) -> list[tuple[str, int, dict[str, Any]]]:
    """Name, chunks and options of the generated schedules."""
    ranks = placement.ranks
    cap = ranks + MORE_THAN_1F1B
    wanted: list[tuple[str, int, dict[str, Any]]] = [
        ("interleaved", several, {}),
        ("depth_first", several, {}),
        ("hybrid", several, {"group": min(2 * ranks, microbatches)}),
        ("breadth_first", several, {}),
        ("memory_capped", 1, {"cap": cap, "costs": one}),
        ("memory_capped", several, {"cap": cap * several, "costs": many}),
    ]
    if one.weight is not None:
        wanted.append(("memory_capped", 1, {"cap": cap, "costs": one, "split": True}))
        wanted += [("zb_h1", 1, {}), ("zbv", 2, {}), ("dualpipev", 2, {})]
    return wanted


def _title(name: str, options: dict[str, Any]) -> str:
    number = options.get("group", options.get("cap"))
    return name + (f":{number}" if number else "") + (", W apart" if options.get("split") else "")


def _lost(costs: Costs, ranks: int, microbatches: int, replicas: int) -> list[Row]:
    """A rank of one of ``replicas`` pipelines is lost, the one whose loss costs most; against 1F1B of all of
    them. Links are perfect."""
    alike = {
        name: _columns(value, ranks, name).mean(axis=1)
        for name in ("forward", "backward", "weight")
        if (value := getattr(costs, name)) is not None
    }
    costs = replace(costs, link=PERFECT, links={}, input=None, **alike)
    whole = rerouted_makespan(ranks, microbatches, replicas, costs, lost=None)
    found = {}
    for split in (False, True) if costs.weight is not None else (False,):
        name = f"a rank of {replicas} pipelines lost, re-routed{', W apart' * split}"
        found[name] = max(
            rerouted_makespan(ranks, microbatches, replicas, costs, lost=stage, split=split)
            for stage in range(ranks)
        )
    # The other replicas run all micro-batches; some of them run one less.
    more = -(-microbatches * replicas // (replicas - 1))
    dropped = Program(generate("1f1b", ranks=ranks, microbatches=more), links=False)
    found[f"its whole pipeline of {replicas} dropped"] = dropped.makespan(replace(costs, reduction=0.0))
    return [
        Row(
            name=name,
            chunks=1,
            seconds=seconds,
            bubble=0.0,
            against=seconds / whole,
            activations=0.0,
            bytes=0.0,
            demands=None,
        )
        for name, seconds in found.items()
    ]
