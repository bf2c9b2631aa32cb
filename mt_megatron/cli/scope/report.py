"""``mt-megatron scope report``: one self-contained HTML page of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_EXAMPLE = """examples:
  mt-megatron scope report RUN
  mt-megatron scope report RUN --output why.html --first-step 1000

exit codes: 0 written, 2 wrong use, no such recording, or no place to write"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="write one self-contained HTML page of a run",
        description="Write one HTML page about what a run recorded, during it or afterwards: alerts and the\n"
        "first value that is not finite, loss, statistics of all layers as heat maps and lines, experts,\n"
        "what was dropped, what was perturbed. It fetches nothing.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="(RUN/scope/report.html)")
    parser.add_argument(
        "--first-step", type=int, default=0, metavar="N", help="look at steps from this one on"
    )
    parser.add_argument("--last-step", type=int, metavar="N", help="look at steps up to this one")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the page and print its gist; returns the exit code."""
    from mt_megatron.errors import ConfigError
    from mt_megatron.scope.recording.reader import open_recording
    from mt_megatron.scope.report.gather import gathered
    from mt_megatron.scope.report.html import write_report

    if args.last_step is not None and args.first_step > args.last_step:
        raise ConfigError(
            f"--first-step {args.first_step} is after --last-step {args.last_step}; expected it before "
            "or equal"
        )
    with open_recording(args.run) as recording:
        data = gathered(recording, first=args.first_step, last=args.last_step)
        path = args.output or recording.files.root / "report.html"
        write_report(data, path)
    steps = data.steps.step
    print(f"{data.run}: " + (f"steps {steps[0]}-{steps[-1]}" if len(steps) else "no steps"))
    for alert in data.alerts[-5:]:
        print(f"  alert at step {alert.step}: {alert.text}")
    if not data.alerts:
        print("  no alerts")
    print(path)
    return 0
