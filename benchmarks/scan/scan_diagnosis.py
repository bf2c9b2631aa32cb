"""Share of right culprits named by the diagnosis of traces: simulated runs with known faults, labels hidden.

    python benchmarks/scan/scan_diagnosis.py [--seeds 200] [--first-seed 0] [--record results/]

Each seed is one run of each category: one slow rank (+20 %, +10 %), a slow link (+5 ms or a quarter of the
bandwidth) in a PP, TP, DP and EP group, two faults at once, and two of the other causes in turn. The
detector gets the run's folder and nothing else. How a diagnosis is judged is written in
``tools/scan_simulator/scores.py``; how runs are drawn in ``trials.py`` beside it. What is simulated is
not measured: real faults are judged by ``scan_live.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # For the modules that all benchmarks share.

from recording import machine, record, table  # noqa: E402

from mt_megatron.scan.diagnose.run import diagnose  # noqa: E402
from tools.scan_simulator import Layout, simulate  # noqa: E402
from tools.scan_simulator.scores import Verdict, confusion, f1_by_cause, judged  # noqa: E402
from tools.scan_simulator.trials import SINGLE, Trial, clean, double, single  # noqa: E402

EVERY_SEED = ("compute +20%", "compute +10%", "link pp", "link tp", "link dp", "link ep", "two at once")
IN_TURN = tuple(name for name in SINGLE if name not in EVERY_SEED)
WANTED = {
    "compute +20%": ("placed", 0.99),
    "compute +10%": ("placed", 0.90),
    "link pp": ("found", 0.95),
    "link tp": ("found", 0.95),
    "link dp": ("found", 0.95),
    "link ep": ("found", 0.95),
    "two at once": ("found", 0.90),
}
"""Category -> what is demanded of which part of its trials."""

CLEAN_STEPS_PER_RUN = 1000


def trials(first: int, seeds: int, clean_steps: int, only: Sequence[str]) -> list[tuple[str, int, int]]:
    """Category, seed and (of clean runs) steps of everything to be judged."""
    wanted = []
    for seed in range(first, first + seeds):
        turns = {IN_TURN[(2 * seed + each) % len(IN_TURN)] for each in (0, 1)}
        wanted += [(name, seed, 0) for name in (*EVERY_SEED, *sorted(turns))]
    runs, rest = divmod(clean_steps, CLEAN_STEPS_PER_RUN)
    lengths = [CLEAN_STEPS_PER_RUN] * runs + ([rest] if rest else [])
    wanted += [("clean", first + index, steps) for index, steps in enumerate(lengths)]
    return [each for each in wanted if not only or each[0] in only]


def made(name: str, seed: int, steps: int) -> Trial:
    """The trial."""
    if name == "clean":
        return clean(seed, steps)
    return double(seed) if name == "two at once" else single(name, seed)


def judge(name: str, seed: int, steps: int) -> Verdict:
    """Simulate one run in a folder of its own, diagnose it, compare with the truth."""
    trial = made(name, seed, steps)
    with tempfile.TemporaryDirectory(prefix="mt-scan-") as folder:
        run = Path(folder) / "run"
        truth = simulate(run, trial.job, trial.faults, seed=trial.seed)
        began = time.perf_counter()
        diagnosis = diagnose(run)
        taken = time.perf_counter() - began
    layout = trial.job.layout
    verdict = judged(name, seed, diagnosis.findings, trial.faults, layout, seconds=taken)
    # What a fault costs takes another simulation: it is asked where that excuses or weighs something.
    found = bool(verdict.found) and all(verdict.found)
    costs = None if found else trial.lost_fraction(truth.step_seconds)
    words = [
        f"{each.cause} {sorted(each.culprits(layout))[:8]} from {each.first}: "
        + ", ".join(f"{key} {value}" for key, value in asdict(each).items() if key in _SHOWN[each.cause])
        for each in trial.faults
    ]
    setting = f"{_sizes(layout)}, {trial.job.microbatches} micro-batches; " + "; ".join(words)
    return replace(verdict, lost_fraction=costs, setting=setting)


def _sizes(layout: Layout) -> str:
    return " ".join(f"{key}{value}" for key, value in asdict(layout).items() if value > 1)


_SHOWN = {
    "slow_compute": ("factor",),
    "slow_data": ("factor",),
    "slow_checkpoint": ("factor",),
    "uneven_work": ("factor",),
    "host_contention": ("share", "mode"),
    "host_pause": ("seconds", "every", "mode"),
    "slow_link": ("latency_ms", "bandwidth"),
    "slow_group": ("group", "latency_ms", "bandwidth"),
    "slow_node_link": ("latency_ms", "bandwidth"),
    "hang": (),
}


def summary(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """One row per category."""
    rows = []
    for name in dict.fromkeys(verdict.category for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.category == name]
        faults = sum(len(verdict.found) for verdict in own)
        harmful = [each for each in own if not all(each.found) and (each.lost_fraction or 0) >= 0.01]
        rows.append(
            {
                "category": name,
                "trials": len(own),
                "placed": _part(sum(all(each.placed) for each in own), len(own)) if faults else None,
                "found": _part(sum(all(each.found) for each in own), len(own)) if faults else None,
                "missed_though_it_costs": len(harmful),
                "wrong": _part(sum(each.wrong for each in own), len(own)),
                "claims": sum(each.claims for each in own),
                "seconds": statistics.median(each.seconds for each in own),
            }
        )
    return rows


def _part(count: int, of: int) -> float | None:
    return count / of if of else None


def report(verdicts: Sequence[Verdict], clean_steps: int) -> tuple[dict[str, Any], str]:
    """Figures, and their tables."""
    rows = summary(verdicts)
    faulty = [each for each in verdicts if each.category != "clean"]
    # Whether a run stands still is easy to tell: it would only raise the mean.
    by_cause = f1_by_cause([each for each in faulty if each.cause not in ("", "hang")])
    macro = statistics.mean(by_cause.values()) if by_cause else None
    wrong = _part(sum(each.wrong for each in faulty), len(faulty))
    alerts = sum(each.claims for each in verdicts if each.category == "clean")
    shown = [
        [
            row["category"],
            str(row["trials"]),
            _percent(row["placed"]),
            _percent(row["found"]),
            str(row["missed_though_it_costs"]),
            _wanted(row),
            _percent(row["wrong"]),
            f"{row['seconds']:.2f}",
        ]
        for row in rows
    ]
    text = table(
        [
            "simulated",
            "runs",
            "right place",
            "found",
            "not found though it costs >= 1 %",
            "wanted",
            "confidently wrong",
            "seconds",
        ],
        shown,
    )
    crossed = confusion(faulty)
    named = sorted({cause for row in crossed.values() for cause in row})
    text += "\n\nTrue cause (rows), named cause (columns):\n\n" + table(
        ["", *named, "F1"],
        [
            [cause, *(str(crossed[cause][each]) for each in named), f"{by_cause.get(cause, 0):.3f}"]
            for cause in sorted(by_cause)
        ],
    )
    text += (
        f"\n\nmacro-F1 {'-' if macro is None else format(macro, '.3f')} (wanted >= 0.90); confidently wrong "
        f"{_percent(wrong)} (wanted <= 1 %); {alerts} alerts in {clean_steps} clean steps (wanted <= 1)"
    )
    figures = {
        "rows": rows,
        "macro_f1": macro,
        "f1": by_cause,
        "confidently_wrong": wrong,
        "clean_alerts": alerts,
    }
    return figures, text


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _wanted(row: dict[str, Any]) -> str:
    key, least = WANTED.get(row["category"], ("", 0.0))
    if not key:
        return "-"
    word = "right place" if key == "placed" else "found"
    return f"{word} >= {100 * least:.0f} %: {'yes' if row[key] >= least else 'NO'}"


def main() -> None:
    """Judge, print, and write down where ``--record`` says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0, help="choose seeds that nobody has seen")
    parser.add_argument("--clean-steps", type=int, default=10_000)
    parser.add_argument("--only", action="append", default=[], metavar="CATEGORY")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--show", choices=("none", "misses", "all"), default="misses")
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    wanted = trials(args.first_seed, args.seeds, args.clean_steps, args.only)
    verdicts: list[Verdict] = []
    began = time.perf_counter()
    with ProcessPoolExecutor(args.processes) as pool:
        running = {pool.submit(judge, *each): each for each in wanted}
        for future in as_completed(running):
            verdict = future.result()
            verdicts.append(verdict)
            if args.show == "all" or (args.show == "misses" and _bad(verdict)):
                print(_line(verdict), flush=True)
            if sys.stderr.isatty():
                print(f"\r{len(verdicts)} of {len(wanted)}", end="", file=sys.stderr, flush=True)
    order = {name: index for index, name in enumerate((*EVERY_SEED, *IN_TURN, "clean"))}
    verdicts.sort(key=lambda each: (order[each.category], each.seed))
    clean_steps = sum(steps for name, _, steps in wanted if name == "clean")
    figures, text = report(verdicts, clean_steps)
    print(
        f"\nSimulated runs, seeds {args.first_seed} to {args.first_seed + args.seeds - 1}, "
        f"{time.perf_counter() - began:.0f} s\n\n{text}"
    )
    if args.record:
        figures = {
            "simulated": True,
            "machine": machine(),
            "seeds": [args.first_seed, args.seeds],
            **figures,
            "missed_or_wrong": [asdict(verdict) for verdict in verdicts if _bad(verdict)],
        }
        record(args.record, "scan-diagnosis-simulated", "Diagnosis of simulated runs", figures, text)


def _bad(verdict: Verdict) -> bool:
    return bool(verdict.wrong) or not all(verdict.found)


def _line(verdict: Verdict) -> str:
    outcome = "WRONG" if verdict.wrong else "missed" if not all(verdict.found) else "found"
    said = "; ".join(verdict.said) or "nothing"
    return (
        f"{outcome} {verdict.category} seed {verdict.seed} (costs {_percent(verdict.lost_fraction)}): "
        f"{verdict.setting} -> {said}"
    )


if __name__ == "__main__":
    main()
