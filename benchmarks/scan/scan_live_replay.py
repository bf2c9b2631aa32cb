"""Diagnosis, repeated step by step, of live runs that ``scan_live.py --keep FOLDER`` left.

    python benchmarks/scan/scan_live_replay.py FOLDER/pp4-1 [FOLDER/dp4-5 ...]

The same judging and telling as the watcher's, one look after every step, so that a change of the detector can
be judged on real runs without making them again. A look is taken to come ``LATE`` seconds after the step that
follows has begun. Hangs are not replayed: they need no detector of steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mt_megatron.scan.analysis.trace import open_trace  # noqa: E402
from mt_megatron.scan.diagnose.run import Diagnoser, read_part  # noqa: E402
from mt_megatron.scan.findings.finding import Finding  # noqa: E402
from mt_megatron.scan.monitor.alert_policy import Telling  # noqa: E402
from mt_megatron.scan.monitor.watch import FEWEST_STEPS, LOOKS, WARM_UP, WINDOW  # noqa: E402

LATE = 1.5
SECONDS, STEPS = 15.0, 10


@dataclass(kw_only=True)
class Said:
    """A finding, and when it was told."""

    finding: Finding
    step: int
    unix: float


@dataclass(kw_only=True)
class Counts:
    """Over all runs replayed."""

    trials: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    in_time: Counter[str] = field(default_factory=Counter)
    alarms: int = 0
    quiet_seconds: float = 0.0


def replay(run: Path) -> list[Said]:
    """Everything that would have been told while ``run`` trained."""
    trace = open_trace(run)
    diagnoser = Diagnoser(trace.places, trace.clocks, looks=LOOKS)
    begins: dict[int, list[float]] = defaultdict(list)
    for rank in trace.ranks:
        recorded = trace.rank(rank)
        steps, exchanges, _ = read_part(rank, recorded, trace.clocks)
        diagnoser.feed(steps, exchanges)
        # The host's clock when the segment began, beside the wall's.
        offset = _wall_less_clock(recorded)
        for iteration, begin in zip(steps.iteration.tolist(), steps.begin.tolist(), strict=True):
            begins[iteration].append((begin + offset) / 1e9)
    diagnoser.settle()
    telling, said = Telling(), []
    whole = sorted(each for each, times in begins.items() if len(times) == len(trace.ranks))
    first = whole[0] + WARM_UP
    for step, following in zip(whole[:-1], whole[1:], strict=True):
        if step - first < FEWEST_STEPS:
            continue
        without = telling.over(step)
        found = diagnoser.findings(first_step=max(first, step - WINDOW), last_step=step, without=without)
        when = max(begins[following]) + LATE
        said += [
            Said(finding=each, step=step, unix=when) for each in telling.news(found, step=step, sure=False)
        ]
    return said


def _wall_less_clock(recorded: Any) -> int:
    for note in (recorded.meta, *recorded.notes):
        if "unix_ns" in note and "monotonic_ns" in note:
            return int(note["unix_ns"]) - int(note["monotonic_ns"])
    raise SystemExit(f"found no pair of clocks in a trace; its notes begin with {recorded.notes[:1]}")


def judge(run: Path, counts: Counts, *, verbose: bool) -> None:
    """Compare with the trials of the run and print one line of each."""
    trials = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    said = replay(run)
    used: set[int] = set()
    before_ranks: set[int] = set()
    before_end = 0.0
    for number, trial in enumerate(trials):
        began, ended = trial["began_unix"], trial["ended_unix"]
        for at, each in enumerate(said):
            if before_end < each.unix < began or (
                began <= each.unix <= ended and each.finding.last_step <= trial["step"]
            ):
                used.add(at)
                own = bool(set(each.finding.ranks) & before_ranks)
                counts.alarms += not own
                if not own or verbose:
                    print(f"    {'after the fault' if own else 'ALARM'}: {_words(each)}")
        counts.quiet_seconds += trial["quiet_seconds"]
        before_ranks, before_end = set(trial["ranks"]), ended
        if "hang" in trial["causes"]:
            continue
        # The trial ended when the watcher of that time named it: what the new one says a little later counts.
        later = trials[number + 1]["began_unix"] if number + 1 < len(trials) else ended + 10
        heard = [
            (at, each)
            for at, each in enumerate(said)
            if began < each.unix < min(later, ended + 6) and each.finding.last_step > trial["step"]
        ]
        used |= {at for at, _ in heard}
        counts.trials[trial["fault"]] += 1
        line = "not named"
        if heard:
            each = heard[0][1]
            right = each.finding.cause in trial["causes"] and set(each.finding.ranks) == set(trial["ranks"])
            seconds, steps = each.unix - began, each.step - trial["step"]
            counts.right[trial["fault"]] += right
            counts.in_time[trial["fault"]] += right and seconds <= SECONDS and steps <= STEPS
            line = f"{'right' if right else 'WRONG'} after {seconds:.1f} s, {steps} steps: {_words(each)}"
        print(
            f"  step {trial['step']}-{trial['last_step']}: {trial['fault']} of {trial['ranks']}"
            f" (live: {trial['named_cause']} {trial['named_ranks']} {trial['seconds']} s): {line}"
        )
        if verbose:
            for _, each in heard[1:]:
                print(f"      then {_words(each)}")


def _words(each: Said) -> str:
    found = each.finding
    said = "; ".join(found.evidence)[:260]
    return (
        f"{found.cause} {list(found.ranks)} steps {found.first_step}-{found.last_step} told at {each.step} "
        f"confidence {found.confidence:.2f} lost {found.lost_fraction:.2f}: {said}"
    )


def main() -> None:
    """Replay and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    counts = Counts()
    for run in options.runs:
        print(run.name)
        judge(run, counts, verbose=options.verbose)
    for name, trials in sorted(counts.trials.items()):
        print(f"{name:24} {counts.right[name]} right, {counts.in_time[name]} in time, of {trials}")
    print(
        f"all {sum(counts.right.values())} right, {sum(counts.in_time.values())} in time, of "
        f"{sum(counts.trials.values())}; {counts.alarms} alarms in {counts.quiet_seconds:.0f} quiet seconds"
    )


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
