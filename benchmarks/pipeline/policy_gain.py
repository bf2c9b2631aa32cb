"""Gain of the policy over the best static schedule, simulated: 8 stages, one slow link that moves.

    policy_gain.py tune                      # histories of ``dwell``
    policy_gain.py judge --cells FILE        # histories of ``markov``, once; adds to FILE
    policy_gain.py judge --cells FILE --microbatches 32 --delays 2 --seeds 125 250     # a part of them
    policy_gain.py join --cells FILE         # the parts together, as a dated result
    policy_gain.py bounds                    # what could be gained with knowledge of the slow link

For each number of micro-batches and each delay of the slow link: the gain in steps per second of the policy
over the one static schedule that is best on average over all the histories, with hindsight, under the same
memory cap (1F1B's activations and 2 more on every rank). Static schedules are all named ones of every
placement that fit, and list schedules that were made without knowledge of the slow link: for healthy links,
and for links that are all equally slow. The policy stays within one placement, sees measured times alone,
and what it decides on the measurements of a step runs from the next step on. A bound that no schedule of its
placement can go below, even with knowledge of each step's true times, stands beside its steps."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.link_histories import HEALTHY, History, draw  # noqa: E402

from mt_megatron.errors import ConfigError  # noqa: E402
from mt_megatron.pipeline.actions import Placement, Style  # noqa: E402
from mt_megatron.pipeline.generate.catalogue import generate  # noqa: E402
from mt_megatron.pipeline.policy.candidates import Candidate, adapted, named  # noqa: E402
from mt_megatron.pipeline.policy.controller import Controller  # noqa: E402
from mt_megatron.pipeline.policy.list_schedule import list_schedule, rules  # noqa: E402
from mt_megatron.pipeline.simulate.costs import Costs, Link  # noqa: E402
from mt_megatron.pipeline.simulate.program import Program  # noqa: E402

RANKS, STEPS, HISTORIES = 8, 50, 250
MICROBATCHES = (16, 32)
DELAYS = (0.25, 0.5, 1.0, 2.0)
NEEDED = {0.25: 0.0, 0.5: 0.01, 1.0: 0.10, 2.0: 0.25}
EXTRA = 2
"""Activations above 1F1B's that every rank may keep."""

CHUNKS = {0.25: 4, 0.5: 2, 1.0: 2, 2.0: 2}
"""Chunks per rank of the policy's placement, by delay: what was best on histories of ``dwell`` over both
numbers of micro-batches."""

LAG = 1
"""Steps from the one that was measured to the first that runs what was decided on it."""

FINAL = 4
"""Static schedules of each class that are compared on all histories: the best on every fourth step of the
first ``SAMPLE`` of them."""

SAMPLE = 10

Floats = npt.NDArray[np.float64]


CLASSES = (
    "named",
    "and list schedules for healthy links",
    "and list schedules for equally slow links",
)
"""Classes of static schedules; each is compared together with those before it."""


@dataclass(frozen=True)
class Static:
    """One schedule for all steps."""

    label: str
    program: Program
    kind: int
    """Index in ``CLASSES``."""


def placements(ranks: int) -> tuple[Placement, ...]:
    """Every placement that static schedules are made for."""
    return (*(Placement(ranks, chunks) for chunks in (1, 2, 4)), Placement(ranks, 2, Style.V))


@lru_cache(maxsize=8)
def statics(ranks: int, microbatches: int, slow: float) -> tuple[Static, ...]:
    """Every static schedule that fits the cap. ``slow``: delay of the slow link."""
    made: list[Static] = []
    for placement in placements(ranks):
        chunks, cap = placement.chunks, cap_of(placement)
        place = _words(placement)
        made += [
            Static(f"{each.label}, {place}", each.program, 0)
            for each in named(placement, microbatches)
            if each.fits(Costs(weight=1.0), cap)
        ]
        for split in (False, True) if placement.style is Style.LOOP else ():
            schedule = generate(
                "memory_capped", ranks=ranks, chunks=chunks, microbatches=microbatches,
                cap=[int(each) for each in cap], split=split, costs=uniform(placement, HEALTHY),
            )  # fmt: skip
            made.append(Static(f"memory_capped{' split' * split}, {place}", Program(schedule), 0))
        for delay in (HEALTHY, *(slow * part for part in (1 / (ranks - 1), 0.25, 0.5, 1))):
            costs, healthy = uniform(placement, delay), delay == HEALTHY
            words = "for healthy links" if healthy else f"for {delay:.2g} F on every link"
            for rule in rules(placement, microbatches, split=True):
                try:
                    found = list_schedule(placement, microbatches, costs, cap, rule)
                except ConfigError:
                    continue
                assert found is not None
                made.append(Static(f"list {words} ({rule}), {place}", Program(found[0]), 1 if healthy else 2))
    return tuple({each.program.schedule.ranks: each for each in reversed(made)}.values())[::-1]


def cap_of(placement: Placement) -> tuple[float, ...]:
    """Activations of a chunk that each rank may keep: 1F1B's and ``EXTRA`` more, of a rank's layers."""
    return (float((placement.ranks + EXTRA) * placement.chunks),) * placement.ranks


def uniform(placement: Placement, delay: float) -> Costs:
    """Times of a history in the mean, with ``delay`` on every link."""
    share = 1 / placement.chunks
    return Costs(forward=share, backward=2 * share, weight=0.92 * share, link=Link(latency=delay))


def least_step(placement: Placement, costs: Costs, cap: Sequence[float]) -> float:
    """Seconds that no schedule of ``placement`` can go below under ``cap``: before the first backward can
    be at a rank, it can run no more forwards than its cap holds; the rest of its work comes after."""
    forward, backward, weight = (np.asarray(each) for each in (costs.forward, costs.backward, costs.weight))
    there = 0.0
    arrives, earliest = {}, {}
    for stage in range(placement.stages):
        rank = placement.rank(stage)
        arrives.setdefault(rank, there)
        there += forward[stage].min() + _delay(placement, costs, stage, stage + 1)
    for stage in reversed(range(placement.stages)):
        earliest[placement.rank(stage)] = min(there, earliest.get(placement.rank(stage), np.inf))
        there += (backward - weight)[stage].min() + _delay(placement, costs, stage, stage - 1)
    bounds = []
    for rank in range(placement.ranks):
        own = list(placement.stages_of(rank))
        room = cap[rank] * forward[own].max()
        done = min(forward[own].sum(), room, max(0.0, earliest[rank] - arrives[rank]))
        bounds.append(earliest[rank] + forward[own].sum() + backward[own].sum() - done)
    return float(max(bounds))


def _delay(placement: Placement, costs: Costs, stage: int, other: int) -> float:
    if not 0 <= other < placement.stages:
        return 0.0
    edge = placement.rank(stage), placement.rank(other)
    return 0.0 if edge[0] == edge[1] else costs.link_of(edge).latency


@dataclass(frozen=True)
class Run:
    """The policy over one history."""

    seconds: Floats
    """Of each step, [steps]."""

    switches: int
    decisions: int
    deciding: float
    """Real seconds that the decisions took."""

    least: float
    """Mean over the steps of ``least_step``."""


def run_policy(history: History, chunks: int) -> Run:
    """The policy over ``history``."""
    placement = Placement(history.ranks, chunks)
    costs = [history.costs(placement, step) for step in range(history.steps)]
    control = Controller(placement, history.microbatches, cap=cap_of(placement))
    seconds = np.zeros(history.steps)
    ahead = _timed(control.current, costs)
    waiting: dict[int, object] = {}
    switches = decisions = 0
    deciding = 0.0
    for step in range(history.steps):
        if (decision := waiting.pop(step, None)) is not None:
            control.adopt(decision)  # type: ignore[arg-type]
            if not control.current.fits(Costs(weight=1.0), control.cap):
                raise RuntimeError(f"{control.current.label} passes the memory cap")
            ahead = np.concatenate([np.zeros(step), _timed(control.current, costs[step:])])
            switches += 1
        seconds[step] = ahead[step]
        split = bool(control.current.schedule.splits_backward)
        control.observe(history.measured(placement, costs[step], step, seconds[step], split))
        if not waiting:
            begin = time.perf_counter()
            decision = control.propose()
            deciding += time.perf_counter() - begin
            if decision is not None:
                decisions += 1
                if decision.switches:
                    waiting[step + LAG] = decision
    least = float(np.mean([least_step(placement, each, cap_of(placement)) for each in costs]))
    return Run(seconds, switches, decisions, deciding, least)


def _timed(candidate: Candidate, costs: Sequence[Costs]) -> Floats:
    return np.asarray(candidate.program.makespans(costs))


@dataclass
class Cell:
    """One number of micro-batches and one delay over many histories."""

    microbatches: int
    delay: float
    seeds: list[int]
    policy: Floats
    """Mean step of each history, [histories]."""

    static: dict[str, Floats]
    """The same of each static schedule."""

    kind: dict[str, int]
    """Index of each static schedule's class."""

    least: Floats
    """``least_step`` of each history in the mean, [histories]."""

    switches: Floats
    """Of each history, [histories]; so the next one."""

    decisions: Floats
    deciding: Floats
    """Real seconds that the decisions of each history took."""

    def best(self, kind: int) -> str:
        """The static schedule of the classes up to ``kind`` that is best on average."""
        return min(
            (each for each in self.static if self.kind[each] <= kind),
            key=lambda each: float(self.static[each].mean()),
        )

    def gains(self, label: str) -> Floats:
        """Gain in steps per second of each history."""
        return self.static[label] / self.policy - 1

    def as_json(self) -> dict[str, object]:
        """The cell as plain values."""
        return {
            "microbatches": self.microbatches,
            "delay": self.delay,
            "seeds": self.seeds,
            "policy": self.policy.round(4).tolist(),
            "least": self.least.round(4).tolist(),
            "static": {label: values.round(4).tolist() for label, values in self.static.items()},
            "class": self.kind,
            "switches": self.switches.tolist(),
            "decisions": self.decisions.tolist(),
            "seconds_deciding": self.deciding.round(4).tolist(),
        }


def joined(parts: Sequence[dict[str, Any]]) -> list[Cell]:
    """The cells that ``parts`` are pieces of. A history that is in two of them, or a static schedule that is
    in one alone, is an error."""
    cells = {}
    for key in dict.fromkeys((part["microbatches"], part["delay"]) for part in parts):
        own = [part for part in parts if (part["microbatches"], part["delay"]) == key]
        seeds = [seed for part in own for seed in part["seeds"]]
        if len(set(seeds)) < len(seeds) or any(part["class"] != own[0]["class"] for part in own):
            raise ConfigError(f"{key}: the parts overlap, or compare with other static schedules")

        def together(name: str, own: Sequence[dict[str, Any]] = own) -> Floats:
            return np.concatenate([np.asarray(part[name], dtype=np.float64) for part in own])

        cells[key] = Cell(
            *key,
            seeds,
            together("policy"),
            {
                label: np.concatenate([np.asarray(part["static"][label]) for part in own])
                for label in own[0]["static"]
            },
            own[0]["class"],
            together("least"),
            together("switches"),
            together("decisions"),
            together("seconds_deciding"),
        )
    return list(cells.values())


def measure(
    mechanism: str,
    seeds: Sequence[int],
    microbatches: int,
    delay: float,
    *,
    ranks: int = RANKS,
    steps: int = STEPS,
) -> Cell:
    """The cell over the histories of ``seeds``. The static schedules that are compared on all of them are
    the best ones on the first ``SAMPLE`` seeds of the mechanism, whatever ``seeds``."""

    final = finalists(mechanism, microbatches, delay, ranks, steps)
    histories = _drawn(mechanism, seeds, microbatches, delay, ranks, steps)
    times = [_Times(histories[at : at + SAMPLE]) for at in range(0, len(histories), SAMPLE)]
    static = {each.label: np.concatenate([part.of(each) for part in times]) for each in final}
    runs = [run_policy(history, CHUNKS[delay]) for history in histories]
    return Cell(
        microbatches,
        delay,
        list(seeds),
        np.array([run.seconds.mean() for run in runs]),
        static,
        {each.label: each.kind for each in final},
        np.array([run.least for run in runs]),
        np.array([run.switches for run in runs], dtype=np.float64),
        np.array([run.decisions for run in runs], dtype=np.float64),
        np.array([run.deciding for run in runs]),
    )


@lru_cache(maxsize=8)
def finalists(mechanism: str, microbatches: int, delay: float, ranks: int, steps: int) -> tuple[Static, ...]:
    """The static schedules of each class that are best on the first ``SAMPLE`` seeds."""
    every = statics(ranks, microbatches, delay)
    sample = _Times(_drawn(mechanism, range(SAMPLE), microbatches, delay, ranks, steps), 4)
    coarse = {each.label: float(sample.of(each).mean()) for each in every}
    return tuple(
        each
        for kind in range(len(CLASSES))
        for each in sorted((e for e in every if e.kind == kind), key=lambda e: coarse[e.label])[:FINAL]
    )


def _drawn(
    mechanism: str, seeds: Iterable[int], microbatches: int, delay: float, ranks: int, steps: int
) -> list[History]:
    return [
        draw(mechanism, seed, ranks=ranks, microbatches=microbatches, steps=steps, delay=delay)
        for seed in seeds
    ]


class _Times:
    """Steps of several histories under static schedules, all at once."""

    def __init__(self, histories: Sequence[History], every: int = 1) -> None:
        """``every``: of how many steps one is timed."""
        self._histories, self._every = histories, every
        self._costs: dict[Placement, list[Costs]] = {}

    def of(self, static: Static) -> Floats:
        """Mean step of each history, [histories]."""
        placement = static.program.schedule.placement
        if placement not in self._costs:
            self._costs[placement] = [
                history.costs(placement, step)
                for history in self._histories
                for step in range(0, history.steps, self._every)
            ]
        seconds = static.program.makespans(self._costs[placement])
        means: Floats = seconds.reshape(len(self._histories), -1).mean(axis=1)
        return means


def rows(cell: Cell) -> Iterator[tuple[str, ...]]:
    """Lines of the table."""
    for kind, words in enumerate(CLASSES):
        label = cell.best(kind)
        gains = cell.gains(label)
        low, middle = np.percentile(gains, [5, 50])
        saved = float(np.median(1 - cell.policy / cell.static[label]))
        passed = middle >= NEEDED[cell.delay] and low >= -0.01
        yield (
            str(cell.microbatches),
            f"{cell.delay:g}",
            words,
            f"{middle:+.1%}",
            f"{saved:+.1%}",
            f"{low:+.1%}",
            f"{gains.min():+.1%}",
            f"{np.median(cell.static[label] / cell.least - 1):+.1%}",
            f"{NEEDED[cell.delay]:.0%}",
            "yes" if passed else "NO",
            label,
        )


HEADER = (
    "micro-batches", "d / F", "static schedules", "median gain", "time saved", "5th percentile", "worst",
    "bound", "needed", "kept", "best static schedule",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("tune", "judge", "join", "bounds"))
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, HISTORIES), metavar=("FIRST", "END"))
    parser.add_argument("--microbatches", type=int, nargs="*", default=MICROBATCHES)
    parser.add_argument("--delays", type=float, nargs="*", default=DELAYS)
    parser.add_argument("--cells", type=Path, help="JSON lines of cells: written by judge, read by join")
    parser.add_argument("--record", action="store_true", help="with bounds: write a dated result")
    options = parser.parse_args()
    if options.what == "join":
        write(joined([json.loads(line) for line in options.cells.read_text().splitlines()]))
        return
    if options.what == "bounds":
        from recording import machine, record, table

        lines = [line for m in options.microbatches for delay in options.delays for line in bounds(m, delay)]
        text = table(BOUNDS, lines)
        print(text)
        if options.record:
            folder = Path(__file__).resolve().parents[2] / "results"
            title = "What knowledge of the slow link could bring, simulated"
            data = {"machine": machine(), "rows": [dict(zip(BOUNDS, line, strict=True)) for line in lines]}
            print(*record(folder, "pipeline-policy-bounds", title, data, text), sep="\n")
        return
    mechanism = {"tune": "dwell", "judge": "markov"}[options.what]
    for microbatches in options.microbatches:
        for delay in options.delays:
            begin = time.time()
            cell = measure(mechanism, range(*options.seeds), microbatches, delay)
            if options.cells is not None:
                with options.cells.open("a") as file:
                    file.write(json.dumps({"mechanism": mechanism, **cell.as_json()}) + "\n")
            print(
                f"# {mechanism} {microbatches} {delay}: {time.time() - begin:.0f} s; a history has "
                f"{cell.switches.mean():.1f} switches and {cell.decisions.mean():.1f} decisions of "
                f"{cell.deciding.sum() / cell.decisions.sum():.3f} s"
            )
            print("\n".join("  ".join(row) for row in rows(cell)), flush=True)


BOUNDS = (
    "micro-batches", "d / F", "best named schedule", "its step", "placement", "adapted", "gain", "bound",
    "gain at most",
)  # fmt: skip


def bounds(microbatches: int, delay: float) -> Iterator[tuple[str, ...]]:
    """Lines of the table of what knowledge of the slow link could bring: even stages, no noise, the slow link
    at every place in turn. Steps are means over the places."""
    edges = range(RANKS - 1)
    best = min(
        (
            (
                float(
                    each.program.makespans(
                        [_even(each.program.schedule.placement, e, delay) for e in edges]
                    ).mean()
                ),
                each,
            )
            for each in statics(RANKS, microbatches, delay)
            if each.kind == 0
        ),
        key=lambda found: found[0],
    )
    for placement in placements(RANKS):
        cap = cap_of(placement)
        steps, least = [], []
        for edge in edges:
            costs = _even(placement, edge, delay)
            made = adapted(placement, microbatches, costs, cap, split=True)
            assert made is not None
            steps.append(made.program.makespan(costs))
            shape = placement.stages, microbatches
            full = {name: np.full(shape, getattr(costs, name)) for name in ("forward", "backward", "weight")}
            least.append(least_step(placement, replace(costs, **full), cap))
        yield (
            str(microbatches),
            f"{delay:g}",
            best[1].label,
            f"{best[0]:.1f} F",
            _words(placement),
            f"{np.mean(steps):.1f} F",
            f"{best[0] / np.mean(steps) - 1:+.1%}",
            f"{np.mean(least):.1f} F",
            f"{best[0] / np.mean(least) - 1:+.1%}",
        )


def _words(placement: Placement) -> str:
    plural, style = "s" * (placement.chunks > 1), " as a V" * (placement.style is Style.V)
    return f"{placement.chunks} chunk{plural}{style}"


def _even(placement: Placement, edge: int, delay: float) -> Costs:
    slow = Link(latency=HEALTHY + delay)
    return replace(uniform(placement, HEALTHY), links={(edge, edge + 1): slow, (edge + 1, edge): slow})


def write(cells: Sequence[Cell]) -> None:
    """The dated result of the judged ``cells``."""
    from recording import machine, record, table

    text = table(HEADER, [row for cell in cells for row in rows(cell)])
    print(text)
    figures = {
        "machine": machine(),
        "mechanism": "markov",
        "steps": STEPS,
        "chunks": CHUNKS,
        "cells": [cell.as_json() for cell in cells],
    }
    folder = Path(__file__).resolve().parents[2] / "results"
    for path in record(folder, "pipeline-policy-markov", "Gain of the policy, simulated", figures, text):
        print(path)


if __name__ == "__main__":
    main()
