"""``mt-megatron scan status``: how a traced run stands right now."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_megatron.errors import ConfigError

if TYPE_CHECKING:
    from mt_megatron.scan.monitor.status import RunStatus

_EXAMPLE = """examples:
  mt-megatron scan status RUN
  mt-megatron scan status RUN --every 5

exit codes: 0 nothing claimed so far, 1 something is claimed
(confidence 0.5 or more), or the trace cannot be read, 2 wrong use or no such trace"""

_SILENT_S = 10.0
_MOST_ROWS = 40


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    text = "show how a traced run stands: steps, silent ranks, what was found"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status",
        help=text,
        description="Show the last step and its time, ranks that have written nothing for a while and\n"
        "what they are in, ranks whose recording ended and why, dropped events, and what the watcher has\n"
        "named; of a run that has ended what scan report claims. Reads files only: the run does not notice.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("--every", type=float, metavar="S", help="show again every S seconds until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the status; returns the exit code."""
    from mt_megatron.scan.monitor.status import run_status
    from mt_megatron.scan.report.data import finite

    if args.every is not None and not args.every > 0:
        raise ConfigError(f"--every is {args.every:g}; expected seconds above 0")
    status = None
    while True:
        status = run_status(args.run, status)
        if args.json:
            print(json.dumps(finite({**asdict(status), "step": status.step}), default=str), flush=True)
        else:
            if args.every and sys.stdout.isatty():
                print("\033[H\033[2J", end="")
            print(text(status), flush=True)
        if not args.every:
            return 1 if status.findings else 0
        time.sleep(args.every)


def text(status: RunStatus) -> str:
    """For people: the whole in a line, then ranks that are worth one, then the findings."""
    from mt_megatron.scan.findings.text import cost, headline, named_before, number_of_ranks, rank_list

    seconds = status.step_seconds
    simulated = " (simulated)" if status.simulated else ""
    lines = [
        f"{status.run}{simulated}: {number_of_ranks(len(status.ranks))}, step {status.step}"
        + (f", {seconds:.3g} s a step" if seconds == seconds else "")
    ]
    levels = sorted({rank.level for rank in status.ranks if rank.level})
    if levels:
        lines[0] += f", level {'/'.join(levels)}"
    failed = set(status.not_recording)
    silent = [rank for rank in status.ranks if rank.silent_seconds > _SILENT_S and rank.ended is None]
    if status.absent:
        lines.append(f"  no file of rank(s) {rank_list(status.absent)} that can be read")
    if status.ranks and all(rank.ended is not None for rank in status.ranks) and not failed:
        lines.append("  all ranks have closed their traces: the run has ended")
    elif silent and len(silent) == len(status.ranks):
        quiet = min(rank.silent_seconds for rank in silent)
        lines.append(f"  no rank has written anything for {quiet:.0f} s: the run has ended, or stands still")
        silent = []
    noted = [
        rank
        for rank in status.ranks
        if rank.rank in failed or rank in silent or rank.dropped or (rank.inside and rank.ended is None)
    ]
    # Who records nothing is seen nowhere else: first.
    noted.sort(key=lambda rank: (rank.rank not in failed, rank.rank))
    for rank in noted[:_MOST_ROWS]:
        parts = [f"step {rank.step}"]
        if rank.ended is not None and rank.rank in failed:
            parts = [f"no longer recorded, {rank.ended.words()}"]
        if rank in silent:
            parts.append(f"silent for {rank.silent_seconds:.0f} s")
        if rank.inside and rank.ended is None:
            parts.append(f"in {rank.inside}")
        if rank.dropped:
            parts.append(f"{rank.dropped} events dropped")
        host = f" ({rank.host})" if rank.host else ""
        lines.append(f"  rank {rank.rank}{host}: {', '.join(parts)}")
    if len(noted) > _MOST_ROWS:
        lines.append(f"  and {len(noted) - _MOST_ROWS} more ranks")
    for finding in status.findings:
        lines.append(f"{headline(finding)}: {cost(finding)} (confidence {finding.confidence:.2f})")
    lines += [named_before(finding) for finding in status.named_before]
    if not status.findings and status.ended:
        lines.append("no culprit found")
    elif not status.findings:
        lines.append("nothing found so far; `scan report` judges all steps")
    if status.weak_signals:
        lines.append(f"{status.weak_signals} weak signal{'s' * (status.weak_signals > 1)}: see scan report")
    return "\n".join(lines)
