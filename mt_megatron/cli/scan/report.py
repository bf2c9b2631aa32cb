"""``mt-megatron scan report``: who held a run up, as Markdown, JSON and one HTML page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError

_EXAMPLE = """examples:
  mt-megatron scan report RUN
  mt-megatron scan report RUN --first-step 200 --last-step 400 --output why-slow
  mt-megatron scan report RUN --json | jq .findings

exit codes: 0 nothing is claimed, 1 a rank, link or group, or something common to all ranks, holds the run up
(confidence 0.5 or more), or the trace cannot be read, 2 wrong use or no such trace"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    text = "name who holds a run up: Markdown, JSON and one HTML page"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help=text,
        description="Read the trace of a run, during it or afterwards, and name the ranks, links and\n"
        "groups that hold it up: cost, evidence, what to do next; then the ranks as a grid, a timeline\n"
        "around the event, and where a step's time goes. The HTML page fetches nothing.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write the report (RUN/scan/report)"
    )
    add_steps(parser)
    parser.add_argument("--json", action="store_true", help="print the JSON instead of a summary")
    parser.set_defaults(func=run)
    return parser


def add_steps(parser: argparse.ArgumentParser) -> None:
    """``--first-step``, ``--last-step`` and ``--start``."""
    parser.add_argument("--first-step", type=int, metavar="N", help="look at steps from this one on")
    parser.add_argument("--last-step", type=int, metavar="N", help="look at steps up to this one")
    add_start(parser)


def add_start(parser: argparse.ArgumentParser) -> None:
    """``--start``."""
    parser.add_argument(
        "--start",
        type=int,
        metavar="N",
        help="look at this start of the run, from 1 (the newest that recorded a whole step)",
    )


def check_steps(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` when no step can lie between them."""
    first, last = args.first_step, args.last_step
    if first is not None and last is not None and first > last:
        raise ConfigError(f"--first-step {first} is after --last-step {last}; expected it before or equal")


def run(args: argparse.Namespace) -> int:
    """Write the report and print its gist; returns the exit code."""
    from mt_megatron.scan.findings.text import (
        MOST_WEAK,
        WEAK_SIGNALS,
        cost,
        headline,
        next_step,
        sentence,
        weak_signal,
    )
    from mt_megatron.scan.report.gather import write_report

    check_steps(args)
    files = write_report(
        args.run, args.output, first_step=args.first_step, last_step=args.last_step, start=args.start
    )
    if args.json:
        print(json.dumps(files.data.to_dict(), indent=1))
        return 1 if files.data.findings else 0
    simulated = " (simulated)" if files.data.simulated else ""
    print(f"{files.data.run}{simulated}: steps {files.data.first_step}-{files.data.last_step}")
    for finding in files.data.findings:
        print(f"\n{headline(finding)}")
        print(f"  costs {cost(finding, files.data.seconds_of(finding))}; confidence {finding.confidence:.2f}")
        for each in finding.evidence:
            print(f"  - {sentence(each)}")
        print(f"  next: {next_step(finding, run_ended=files.data.run_ended, one_host=files.data.one_host)}")
    if not files.data.findings:
        print("No culprit found: no rank, link or group held the others up by more than the usual jitter.")
    if files.data.weak_signals:
        print(f"\nWeak signals ({len(files.data.weak_signals)}). {WEAK_SIGNALS}")
        for signal in files.data.weak_signals[:MOST_WEAK]:
            print(f"  {weak_signal(signal)}")
        if len(files.data.weak_signals) > MOST_WEAK:
            print(f"  {len(files.data.weak_signals) - MOST_WEAK} more: see report.json")
    print(f"\n{files.html}\n{files.markdown}\n{files.json}")
    return 1 if files.data.findings else 0
