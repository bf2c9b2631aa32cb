"""``mt-megatron pipeline explain``: what ``--pipeline-schedule auto`` decided in a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.files import run_root


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="what auto decided in a run, why, and what it brought",
        description="Say which link was slow, which schedule was chosen and what it brought, from the\n"
        "log that a run with --pipeline-schedule auto leaves beside its metrics.",
        epilog="examples:\n  mt-megatron pipeline explain runs/llama3\n\nexit codes: 0 fine, 2 wrong use",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, or its log")
    parser.add_argument("--json", action="store_true", help="print the records as one JSON array")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the decisions; returns the exit code."""
    from mt_megatron.pipeline.policy.decision_log import find, records
    from mt_megatron.pipeline.policy.explain import lines

    found = records(find(run_root(args.run_folder)))
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        for line in lines(found):
            print(line)
    return 0
