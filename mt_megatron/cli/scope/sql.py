"""``mt-megatron scope sql``: a question to a run's recording in SQL."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_EXAMPLE = """examples:
  mt-megatron scope sql RUN "select step, loss, grad_norm from steps where current order by step desc limit 5"
  mt-megatron scope sql RUN "select layer, max(value) from stats where statistic = 'gradient_norm'
    and layer is not null group by layer order by layer"
  mt-megatron scope sql RUN "select step, path, value from stats where statistic = 'not_finite' and value > 0
    order by step limit 1"

exit codes: 0 fine, 2 wrong use or no such recording"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "sql",
        help="ask a run's recording in SQL, offline",
        description="Ask a run's recording in SQL (SQLite's), over all nodes' files. Nothing is written.\n"
        "Views: sessions, ranks, modules, steps, rank_steps, stats, vectors, tensors, tokens, alerts,\n"
        "dropped, perturbed, bookmarks, thinned, requests; docs/31-scope-recording.md has their columns.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("statement", metavar="SQL", help="one SELECT, or - to read it from stdin")
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="of the answer (%(default)s)"
    )
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the answer; returns the exit code."""
    from mt_megatron.cli.scan.sql import show
    from mt_megatron.scope.recording.reader import open_recording
    from mt_megatron.scope.recording.sql import query

    with open_recording(args.run) as recording:
        answer = query(recording, sys.stdin.read() if args.statement == "-" else args.statement)
    show(answer.columns, answer.rows, args.format)
    return 0
