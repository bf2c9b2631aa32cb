"""What the policy brings against the best static schedule, simulated: 8 stages, one slow link that moves.

    python benchmarks/pipeline/policy_gain.py tune            # histories of ``dwell``
    python benchmarks/pipeline/policy_gain.py judge --record  # histories of ``markov``, once

For each number of micro-batches and each delay of the slow link: the gain in steps per second of the policy over
the one static schedule that is best on average over all the histories, with hindsight, under the same memory
cap (1F1B's activations and 2 more on every rank). Static schedules are all named ones of every placement that
fit, and list schedules that were made without knowledge of the slow link: for healthy links, and (counted
apart) for links that are all equally slow. The policy stays within one placement, sees measured times alone,
and what it decides on the measurements of a step runs from the second step after it on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.link_histories import HEALTHY, History, draw  # noqa: E402

from mt_megatron.errors import ConfigError  # noqa: E402
from mt_megatron.pipeline.actions import Placement, Style  # noqa: E402
from mt_megatron.pipeline.generate.capped import capped  # noqa: E402
from mt_megatron.pipeline.policy.candidates import Candidate, named  # noqa: E402
from mt_megatron.pipeline.policy.controller import Controller  # noqa: E402
from mt_megatron.pipeline.policy.list_schedule import list_schedule, rules  # noqa: E402
from mt_megatron.pipeline.simulate.costs import Costs, Link  # noqa: E402
from mt_megatron.pipeline.simulate.program import Program  # noqa: E402

RANKS, STEPS, HISTORIES = 8, 100, 250
MICROBATCHES = (16, 32)
DELAYS = (0.25, 0.5, 1.0, 2.0)
NEEDED = {0.25: 0.0, 0.5: 0.01, 1.0: 0.10, 2.0: 0.25}
EXTRA = 2
"""Activations above 1F1B's that every rank may keep."""

CHUNKS = 2
"""Of the policy's placement."""

LAG = 1
"""Steps from the one that was measured to the first that runs what was decided on it."""

FINAL = 8
"""Static schedules that are compared on all histories: the best on the first ``SAMPLE`` of them."""

SAMPLE = 10

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Static:
    """One schedule for all steps."""

    label: str
    program: Program
    spread: bool
    """Whether it was made for links that are all equally slow."""


@lru_cache(maxsize=4)
def statics(ranks: int, microbatches: int) -> tuple[Static, ...]:
    """Every static schedule that fits the cap."""
    made: list[Static] = []
    for placement in (*(Placement(ranks, chunks) for chunks in (1, 2, 4)), Placement(ranks, 2, Style.V)):
        chunks, cap = placement.chunks, cap_of(placement)
        place = f"{chunks} chunk{'s' * (chunks > 1)}{' as a V' * (placement.style is Style.V)}"
        ones = Costs(weight=1.0)
        made += [
            Static(f"{each.label}, {place}", each.program, False)
            for each in named(placement, microbatches)
            if each.fits(ones, cap)
        ]
        for delay in (HEALTHY, *sorted({delay * part for delay in DELAYS for part in (1 / 7, 0.25, 0.5, 1)})):
            costs = uniform(placement, delay)
            words = f"made for {'healthy links' if delay == HEALTHY else f'{delay:.2g} F on every link'}"
            for rule in (*rules(placement, microbatches, split=True), *rules(placement, microbatches, split=False)):
                try:
                    found = list_schedule(placement, microbatches, costs, cap, rule)
                except ConfigError:
                    continue
                assert found is not None
                schedule = found[0]
                made.append(
                    Static(f"list ({rule}) {words}, {place}", Program(schedule), delay != HEALTHY)
                )
        costs = uniform(placement, HEALTHY)
        for group in (None, ranks):
            for turns in (False, True):
                for split in (False, True):
                    if placement.style is Style.V or (chunks == 1 and group):
                        continue
                    schedule = capped(
                        placement, microbatches, [int(each) for each in cap],
                        costs=costs, group=group, turns=turns, split=split,
                    )  # fmt: skip
                    words = f"group {group}, turns {turns}, split {split}"
                    made.append(Static(f"memory_capped ({words}), {place}", Program(schedule), False))
    return tuple({each.program.schedule.ranks: each for each in reversed(made)}.values())[::-1]


def cap_of(placement: Placement) -> tuple[float, ...]:
    """Activations of a chunk that each rank may keep: 1F1B's and ``EXTRA`` more, of a rank's layers."""
    return (float((placement.ranks + EXTRA) * placement.chunks),) * placement.ranks


def uniform(placement: Placement, delay: float) -> Costs:
    """Times of a history in the mean, with ``delay`` on every link."""
    share = 1 / placement.chunks
    return Costs(forward=share, backward=2 * share, weight=0.92 * share, link=Link(latency=delay))


@dataclass(frozen=True)
class Run:
    """The policy over one history."""

    seconds: Floats
    """Of each step, [steps]."""

    switches: int
    decisions: int
    deciding: float
    """Real seconds that the decisions took."""


def run_policy(history: History, chunks: int = CHUNKS) -> Run:
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
    return Run(seconds, switches, decisions, deciding)


def _timed(candidate: Candidate, costs: Sequence[Costs]) -> Floats:
    return np.asarray(candidate.program.makespans(costs))


@dataclass
class Cell:
    """One number of micro-batches and one delay over many histories."""

    microbatches: int
    delay: float
    policy: Floats
    """Mean step of each history, [histories]."""

    static: dict[str, Floats]
    """The same of each static schedule."""

    spread: frozenset[str]
    switches: float
    decisions: float
    deciding: float

    def best(self, spread: bool) -> str:
        """The static schedule that is best on average; those made for equally slow links only if ``spread``."""
        return min(
            (each for each in self.static if spread or each not in self.spread),
            key=lambda each: float(self.static[each].mean()),
        )

    def gains(self, label: str) -> Floats:
        """Gain in steps per second of each history."""
        return self.static[label] / self.policy - 1


def measure(
    mechanism: str, seeds: Sequence[int], microbatches: int, delay: float, *, ranks: int = RANKS, steps: int = STEPS
) -> Cell:
    """The cell over the histories of ``seeds``."""
    histories = [
        draw(mechanism, seed, ranks=ranks, microbatches=microbatches, steps=steps, delay=delay) for seed in seeds
    ]
    every = statics(ranks, microbatches)
    sample = histories[:SAMPLE]
    by_set = [
        sorted(
            (each for each in every if each.spread == spread),
            key=lambda each: float(np.mean(_static(each, sample))),
        )[:FINAL]
        for spread in (False, True)
    ]
    final = [each for found in by_set for each in found]
    runs = [run_policy(history) for history in histories]
    return Cell(
        microbatches,
        delay,
        np.array([run.seconds.mean() for run in runs]),
        {each.label: _static(each, histories) for each in final},
        frozenset(each.label for each in final if each.spread),
        float(np.mean([run.switches for run in runs])),
        float(np.mean([run.decisions for run in runs])),
        float(np.sum([run.deciding for run in runs]) / max(1, sum(run.decisions for run in runs))),
    )


def _static(static: Static, histories: Sequence[History]) -> Floats:
    placement = static.program.schedule.placement
    means = []
    for history in histories:
        costs = _costs(history, placement)
        means.append(float(static.program.makespans(costs).mean()))
    return np.array(means)


_kept: dict[tuple[int, Placement], list[Costs]] = {}


def _costs(history: History, placement: Placement) -> list[Costs]:
    key = id(history), placement
    if key not in _kept:
        if len(_kept) > 40:
            _kept.clear()
        _kept[key] = [history.costs(placement, step) for step in range(history.steps)]
    return _kept[key]


def rows(cell: Cell) -> Iterator[tuple[str, ...]]:
    """Lines of the table."""
    for spread in (False, True):
        label = cell.best(spread)
        gains = cell.gains(label)
        low, middle = np.percentile(gains, [5, 50])
        saved = float(np.median(1 - cell.policy / cell.static[label]))
        passed = middle >= NEEDED[cell.delay] and low >= -0.01
        yield (
            str(cell.microbatches),
            f"{cell.delay:g}",
            "equal delays too" if spread else "named, healthy lists",
            f"{middle:+.1%}",
            f"{saved:+.1%}",
            f"{low:+.1%}",
            f"{gains.min():+.1%}",
            f"{NEEDED[cell.delay]:.0%}",
            "yes" if passed else "NO",
            label,
        )


HEADER = (
    "micro-batches", "d / F", "static schedules", "median gain", "time saved", "5th percentile", "worst", "needed",
    "kept", "best static schedule",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("tune", "judge"))
    parser.add_argument("--histories", type=int, default=HISTORIES)
    parser.add_argument("--microbatches", type=int, nargs="*", default=MICROBATCHES)
    parser.add_argument("--delays", type=float, nargs="*", default=DELAYS)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    mechanism = {"tune": "dwell", "judge": "markov"}[options.what]
    from recording import machine, record, table

    found, lines = [], []
    for microbatches in options.microbatches:
        for delay in options.delays:
            begin = time.time()
            cell = measure(mechanism, range(options.histories), microbatches, delay)
            found.append(cell)
            lines += list(rows(cell))
            print(
                f"# {microbatches} {delay}: {time.time() - begin:.0f} s, {cell.switches:.1f} switches and "
                f"{cell.decisions:.1f} decisions a history, {cell.deciding:.3f} s a decision",
                flush=True,
            )
            print("\n".join("  ".join(row) for row in rows(cell)), flush=True)
    text = table(HEADER, lines)
    print(text)
    if options.record:
        figures = {
            "machine": machine(),
            "mechanism": mechanism,
            "histories": options.histories,
            "steps": STEPS,
            "cells": [
                {
                    "microbatches": cell.microbatches,
                    "delay": cell.delay,
                    "switches": cell.switches,
                    "decisions": cell.decisions,
                    "seconds_per_decision": cell.deciding,
                    "policy": cell.policy.tolist(),
                    "static": {label: values.tolist() for label, values in cell.static.items()},
                    "made_for_equal_delays": sorted(cell.spread),
                }
                for cell in found
            ],
        }
        folder = Path(__file__).resolve().parents[2] / "results"
        for path in record(folder, f"pipeline-policy-{mechanism}", "Gain of the policy, simulated", figures, text):
            print(path)


if __name__ == "__main__":
    main()
