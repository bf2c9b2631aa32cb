"""``mt-megatron scope status``: how a recording stands."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_megatron.errors import ConfigError

if TYPE_CHECKING:
    from mt_megatron.scope.report.status import Status

_EXAMPLE = """examples:
  mt-megatron scope status RUN
  mt-megatron scope status RUN --every 5

exit codes: 0 fine, 1 there are alerts of the last session, 2 wrong use or no such recording"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status",
        help="show how a recording stands: steps, ranks, alerts, what was dropped",
        description="Show the last step, its loss and time, ranks that record, have ended or are missing,\n"
        "alerts, dropped frames, what retention has thinned, and what the ranks are asked for. Reads files\n"
        "only: the run does not notice.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("--every", type=float, metavar="S", help="show again every S seconds until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the status; returns the exit code."""
    from mt_megatron.scope.recording.reader import open_recording
    from mt_megatron.scope.report.status import as_map, status_of, text

    if args.every is not None and not args.every > 0:
        raise ConfigError(f"--every is {args.every:g}; expected seconds above 0")
    with open_recording(args.run) as recording:
        while True:
            status: Status = status_of(recording)
            if args.json:
                print(json.dumps(as_map(status)), flush=True)
            else:
                if args.every and sys.stdout.isatty():
                    print("\033[H\033[2J", end="")
                print(text(status), flush=True)
            if not args.every:
                return 1 if status.alerts else 0
            time.sleep(args.every)
