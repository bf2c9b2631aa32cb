"""``mt-megatron scope compare``: the first step and module at which two runs part."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError

_EXAMPLE = """examples:
  mt-megatron scope compare RUN_A RUN_B
  mt-megatron scope compare RUN_TP1 RUN_TP2 --tolerance 1e-3

exit codes: 0 equal, 1 the runs part, or statistics were recorded and none could be compared, 2 wrong use or
no such recording"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare",
        help="find the first step and module at which two runs part",
        description="Compare the recordings of two runs step by step and name the first step whose loss\n"
        "differs, and the first step and module, in execution order, whose statistics do. Layouts may\n"
        "differ: values combine all ranks' parts.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("a", metavar="RUN_A", type=Path, help="folder of a run's outputs")
    parser.add_argument("b", metavar="RUN_B", type=Path, help="folder of another run's")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="R",
        help="relative difference that counts as equal (%(default)g: to the bit)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print where the runs part; returns the exit code."""
    from mt_megatron.scope.recording.reader import open_recording
    from mt_megatron.scope.report.compare import as_map, compare, text

    if not 0 <= args.tolerance < 1:
        raise ConfigError(f"--tolerance is {args.tolerance:g}; expected 0 or more and below 1")
    with open_recording(args.a) as a, open_recording(args.b) as b:
        found = compare(a, b, tolerance=args.tolerance)
    print(json.dumps(as_map(found)) if args.json else text(found))
    return 0 if found.equal else 1
