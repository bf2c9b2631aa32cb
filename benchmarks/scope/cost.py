"""Cost of watching a real training, by paired blocks of two steps.

    python benchmarks/scope/cost.py [--ranks 2] [--layout dp] [--minutes 7] [--record results/]
    python benchmarks/scope/cost.py --sidecars [--minutes 7] [--record results/]
    python benchmarks/scope/cost.py --browsers [--minutes 7] [--record results/]

One training, by our own trainer, in one set of processes: between two unwatched blocks comes one of another
kind, in random order: not watched either (the control), watched without a sampled step, with the default
statistics in its first step, or with a layer's attention in both. A pair is such a block and the two around
it. A block ends when what it sends is encoded, so that nothing of it is left to the next. What the sidecar
does with it has a core of its own in a real job and is left out: frames go to a process that drops them.

At an interval of 20 steps a twentieth of the steps costs what a sampled one does and the others what an
unsampled one does; the upper bound adds up those of both. Collectives are counted by the process groups.

``--sidecars`` watches all blocks, with everything in their first step. Between two with such a process comes
one whose process is stopped, takes 40 KiB a second or was killed, after so many steps that something is
dropped. One rank has a core of its own, as with ``--browsers``.

``--browsers`` watches all blocks by a real sidecar, which serves the page, on one rank. The rank has a core
of its own, and the sidecar and the browsers share the others (``--pin no``: all of them any core). Between
two that nobody looks at comes one with clients that read, are stopped, take a message in half a second or
are killed in its first step; stopped and slow ones also left a download unread. They are websocket clients,
not Chromium. Killed ones have a control of their own: the same process is killed without a connection.
Every block begins and ends when sidecar and clients rest: what connections that open and close leave to do,
and the sidecar's backlog, is counted to no block. The sidecar's own processor time is reported, up to its
rest.

Memory is the peak of a block, from what is resident once freed memory is given back: a trainer on the cpu
backend keeps that, and how much it is differs by tens of MiB, watched or not. With browsers it is looked at
before the blocks whose time is taken, beside blocks that nobody looks at; after them, what is kept of them.

An arm's time is met where its estimate is no larger than the upper end of the A/A band (``band_of``).

``--minutes`` bounds the rounds; a measurement that is cut off is judged by what it had.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # For the modules that all benchmarks share.

from paired_blocks import difference, ranks_of  # noqa: E402
from recording import machine, record, table  # noqa: E402

CONTROL_PERCENT = 0.5
"""A control that differs by more, or an A/A band that reaches further to both sides on average, makes the
result inconclusive."""

INTERVAL = 20
TARGETS = {"default, every 20 steps": 1.0, "attention live": 5.0}
"""Percent, the upper end of the 95 % interval at most."""

MOST_GROWTH_MIB = 64
ENDED = ("frozen", "slow", "dead")
NOBODY = "no browser again"
LOOKING = {"frozen": NOBODY, "slow": NOBODY, "killed": "no browser, process killed"}
"""Kind of browsers -> its control."""


def judged(ran: dict[str, Any]) -> dict[str, Any]:
    """The figures of what ``ranks_of`` returned."""
    arrays = {arm: np.array([blocks[arm] for blocks in ran["blocks"]]) for arm in ran["blocks"][0]}
    found = {arm: difference(each[0, ..., 0]) for arm, each in arrays.items()}
    judge = _of_browsers if "reading" in found else _of_sidecars if "frozen" in found else _of_watching
    verdicts = judge(found, ran["about"])
    if ran["about"].get("ranks", 2) > 1:  # one has none
        verdicts["collectives added"] = _of_collectives(ran["about"])
    return {
        **ran["about"],
        "differences": found,
        "processor_time": {arm: difference(each[..., 1].mean(axis=0)) for arm, each in arrays.items()},
        **({"sidecar_ms": _of_the_sidecar(arrays)} if judge is _of_browsers else {}),
        "verdicts": verdicts,
        "seconds": {arm: each[0, ..., 0].round(6).tolist() for arm, each in arrays.items()},
    }


def _of_the_sidecar(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Its processor time in milliseconds, per arm: of a block up to its rest, of which in the block, and by
    how much the first is more than those of the blocks around."""
    found = {}
    for arm, each in arrays.items():
        within, until_rest = (1e3 * each[0, ..., column] for column in (2, 3))
        more = until_rest[:, 1] - until_rest[:, [0, 2]].mean(axis=1)
        found[arm] = {
            "until_rest": float(until_rest[:, 1].mean()),
            "within": float(within[:, 1].mean()),
            "more": float(more.mean()),
        }
    return found


def _of_watching(found: dict[str, Any], about: dict[str, Any]) -> dict[str, str]:
    """Adds the combined figures to ``found``."""
    others = (INTERVAL - 2) / INTERVAL
    # Its blocks hold two steps of the interval: the sampled one and the one after.
    found["default, every 20 steps"] = {
        key: found["sampled"][key] * 2 / INTERVAL + max(found["unsampled"][key], 0.0) * others
        for key in ("percent", "high")
    }
    found["attention live"] = {key: found["attention"][key] for key in ("percent", "high")}
    restless = _restless(found["off again"])
    return {
        name: restless or ("met" if found[name]["high"] <= most else "missed") + f" (at most {most:g} %)"
        for name, most in TARGETS.items()
    }


def band_of(control: dict[str, float]) -> tuple[float, float]:
    """Percents between which a second control of as many pairs lies with 95 % probability.

    The interval of a control says where its mean lies. An estimate beside it has an error of its own, as
    large: of an arm that costs nothing it is above that interval's upper end once in twelve times.
    """
    middle = control["percent"]
    low, high = (middle + math.sqrt(2.0) * (control[end] - middle) for end in ("low", "high"))
    return low, high


def _of_sidecars(found: dict[str, Any], about: dict[str, Any]) -> dict[str, str]:
    control, verdicts = found["drained again"], {}
    restless = _restless(control) or _wide(control)
    for name in ENDED:
        low, high = band_of(control)
        inside = found[name]["percent"] <= high
        band = f"A/A band {low:+.2f} to {high:+.2f}"
        verdicts[f"{name}: time"] = restless or f"{'met' if inside else 'missed'} ({band})"
        verdicts[f"{name}: memory"] = _grown(about["growth_mib"][name])
        dropped = about["dropped_frames"][name]
        verdicts[f"{name}: drops"] = f"{'met' if dropped else 'missed'} ({dropped:,} frames counted)"
    return verdicts


def _of_browsers(found: dict[str, Any], about: dict[str, Any]) -> dict[str, str]:
    verdicts = {}
    for name, of in LOOKING.items():
        control = found[of]
        restless = _restless(found[NOBODY]) or _wide(control)
        low, high = band_of(control)
        inside = found[name]["percent"] <= high
        band = f"A/A band {low:+.2f} to {high:+.2f}"
        verdicts[f"{name}: time"] = restless or f"{'met' if inside else 'missed'} ({band})"
        verdicts[f"{name}: memory"] = _grown(about["growth_mib"].get(name))
    verdicts["memory kept after all blocks"] = _grown(about["growth_mib"].get("kept"))
    dropped = about["dropped_frames"]["served"]
    verdicts["frames that the rank dropped"] = f"{'missed' if dropped else 'met'} ({dropped:,})"
    return verdicts


def _grown(mib: float | None) -> str:
    if mib is None:
        return "inconclusive: it was cut off before"
    return f"{'met' if mib <= MOST_GROWTH_MIB else 'missed'} ({mib:+.1f} MiB, at most {MOST_GROWTH_MIB})"


def _of_collectives(about: dict[str, Any]) -> str:
    unwatched = about["collectives"]["unwatched"]
    added = {name: count - unwatched for name, count in about["collectives"].items()}
    if not unwatched:
        return "inconclusive: none was counted"
    return f"met (0 beside {unwatched} of a block)" if not any(added.values()) else f"missed ({added})"


def _wide(control: dict[str, float]) -> str | None:
    low, high = band_of(control)
    if high - low > 2 * CONTROL_PERCENT:
        return f"inconclusive: the A/A band is {low:+.2f} to {high:+.2f} %"
    return None


def _restless(control: dict[str, float]) -> str | None:
    if abs(control["percent"]) > CONTROL_PERCENT:
        return f"inconclusive: the control differs by {control['percent']:+.2f} %"
    return None


def shown(figures: dict[str, Any]) -> str:
    """``judged`` as Markdown."""
    found, used = figures["differences"], figures["processor_time"]
    rows = [
        (
            f"{arm}{' (control)' if arm.endswith('again') or arm in LOOKING.values() else ''}",
            f"{found[arm]['percent']:+.2f}",
            f"{found[arm]['low']:+.2f} to {found[arm]['high']:+.2f}",
            f"{used[arm]['percent']:+.2f} ({used[arm]['low']:+.2f} to {used[arm]['high']:+.2f})",
            f"{found[arm]['pairs']}",
        )
        for arm in used
    ]
    rows += [
        (arm, f"{each['percent']:+.2f}", f"at most {each['high']:+.2f}", "", "")
        for arm, each in found.items()
        if arm not in used
    ]
    header = ("blocks of 2 steps", "slower, %", "95 %", "processor time, %", "pairs")
    where = ", each on a core of its own" if figures["pinned"] else ""
    if figures["pinned"] and figures["ranks"] == 1:
        where = ", on a core that the other processes have no share of"
    about = (
        f"{figures['shape']}, {figures['layout']}, {figures['device']}: "
        f"{figures['ranks']} process(es) of {figures['threads']} "
        f"thread(s){where}; a step of {figures['tokens_per_step']} tokens takes "
        f"{1e3 * figures['step_seconds']:.0f} ms."
    )
    if "reading" not in used:
        about += " A process that drains the socket stands in for the sidecar, which needs a core of its own."
    if figures["cut_off"]:
        about += " It was cut off."
    if "sidecar_ms" in figures:
        header = (*header, "sidecar, ms (of which in the block; more)")
        rows = [
            (*row, f"{each['until_rest']:.0f} ({each['within']:.0f}; {each['more']:+.0f})")
            for row, each in zip(rows, figures["sidecar_ms"].values(), strict=True)
        ]
        about += f" {figures['restless_blocks']} blocks began before sidecar and clients rested."
    verdicts = table(("", "verdict"), list(figures["verdicts"].items()))
    return f"{table(header, rows)}\n\n{verdicts}\n\n{about}"


def main() -> int:
    """Measure, print, record; 0 when everything was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (2; with --browsers or --sidecars 1)")
    parser.add_argument("--layout", choices=("dp", "tp"), default="dp", help="how they share the work (dp)")
    parser.add_argument(
        "--shape",
        choices=("small", "tiny", "large", "full"),
        default="small",
        help="tiny: to try it; large, full: for a GPU that waits for launches, and that does not (small)",
    )
    parser.add_argument("--backend", default="cpu", help="cuda with --ranks 1 and --pin no (cpu)")
    parser.add_argument("--threads", type=int, help="of each process; the cores are shared out by default")
    parser.add_argument("--pin", choices=("auto", "yes", "no"), default="auto", help="processes on own cores")
    parser.add_argument(
        "--sidecars", action="store_true", help="frozen, slow and dead ones beside a good one"
    )
    parser.add_argument("--browsers", action="store_true", help="frozen, slow and killed ones beside none")
    parser.add_argument("--rounds", type=int, default=150, help="at most; of a block of every kind (150)")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of it, about (60)")
    parser.add_argument("--record", type=Path, help="folder for a dated record")
    args = parser.parse_args()
    alone = args.browsers or args.sidecars
    args.ranks = args.ranks or (1 if alone else 2)
    if args.browsers and (args.ranks > 1 or args.sidecars):
        parser.error("--browsers takes one rank and no --sidecars")
    threads = args.threads or (1 if alone else max(1, (os.cpu_count() or 1) // args.ranks))
    arguments = [f"--rounds={args.rounds}", f"--seconds={60 * args.minutes}", f"--pin={args.pin}"]
    arguments += [
        f"--layout={args.layout}",
        f"--shape={args.shape}",
        f"--backend={args.backend}",
        *(["--sidecars"] if args.sidecars else []),
        *(["--browsers"] if args.browsers else []),
    ]
    about = machine()
    ran = ranks_of(HERE / "cost_worker.py", args.ranks, threads, arguments, 60 * args.minutes + 60)
    if not all(ran["blocks"][0].values()):
        sys.exit(f"no round was over within {args.minutes:g} minutes; raise --minutes")
    figures = {"machine": about, "training": judged(ran)}
    text = shown(figures["training"])
    print(text)
    if args.record:
        name, title = "scope-cost", "What watching costs"
        if args.sidecars:
            name, title = "scope-sidecars", "What a frozen, slow or dead sidecar costs"
        if args.browsers:
            name, title = "scope-browsers", "What a frozen, slow or killed browser costs"
        name += "" if args.layout == "dp" else f"-{args.layout}"
        name += "" if args.backend == "cpu" else f"-{args.backend}"
        for path in record(args.record, name, title, figures, text):
            print(path)
    return 0 if all(each.startswith("met") for each in figures["training"]["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
