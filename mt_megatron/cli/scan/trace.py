"""``mt-megatron scan trace``: a run's trace for a trace viewer, all ranks on one clock."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mt_megatron.cli.scan.command import code_without
from mt_megatron.cli.scan.report import add_steps, check_steps
from mt_megatron.errors import ConfigError

_EXAMPLE = """examples:
  mt-megatron scan trace RUN --first-step 100 --last-step 105
  mt-megatron scan trace RUN --ranks 0-3,8 --format perfetto --output slow.pftrace

Open the file at ui.perfetto.dev (it stays on your machine) or in chrome://tracing.
exit codes: 0 fine, 1 a problem was found, or the file lacks segments that cannot be read (stderr names
them), 2 wrong use or no such trace"""

_MUCH = 3_000_000
_ENDINGS = {"chrome": "trace.json.gz", "perfetto": "trace.pftrace"}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    text = "write a run's trace for Chrome's or Perfetto's viewer"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        help=text,
        description="Write the trace of a run for a trace viewer: a process per rank, threads and device\n"
        "tracks, counters, and arrows from every send to its receive. Written as a stream: the trace need\n"
        "not fit in memory, but a viewer's has to, so choose steps or ranks of a large one.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument(
        "--format", choices=tuple(_ENDINGS), default="chrome", help="of the file (%(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file (RUN/scan/trace.json.gz)")
    parser.add_argument("--ranks", metavar="LIST", help="only these, such as 0-3,8 (all)")
    add_steps(parser)
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the file; returns the exit code."""
    from mt_megatron.scan.analysis.trace import open_trace
    from mt_megatron.scan.export.rank_stream import Selection

    check_steps(args)
    spans = None if args.ranks is None else parse_ranks(args.ranks)
    trace = open_trace(args.run, start=args.start, causality=True)
    wanted = None
    if spans is not None:
        wanted = frozenset(rank for rank in trace.ranks if any(rank in span for span in spans))
    if wanted is not None and not wanted:
        raise ConfigError(
            f"--ranks {args.ranks}: none of them left a trace; expected ranks of {trace.ranks[0]} to "
            f"{trace.ranks[-1]}"
        )
    selection = Selection(ranks=wanted, first_step=args.first_step, last_step=args.last_step)
    output = args.output or trace.files.root / _ENDINGS[args.format]
    if args.format == "chrome":
        from mt_megatron.scan.export.chrome import write_chrome

        done = write_chrome(trace, output, selection)
    else:
        from mt_megatron.scan.export.pftrace import write_pftrace

        done = write_pftrace(trace, output, selection)
    print(f"{done.path}: {done.events} events of {done.ranks} ranks, {done.bytes / 1e6:.1f} MB")
    print("next: open it at ui.perfetto.dev, where it stays on this machine, or in chrome://tracing")
    if done.events > _MUCH:
        print("That is much for a viewer: choose --first-step and --last-step, or --ranks.", file=sys.stderr)
    lacking = [
        sentence
        for sentence, rank in trace.unreadable.items()
        if spans is None or any(rank in span for span in spans)
    ]
    return code_without(lacking)


def parse_ranks(text: str) -> list[range]:
    """``0-3,8`` as ranges, none of them empty. Raises ``ConfigError``."""
    found: list[range] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--ranks {text!r}: {part!r} is no rank. Expected a list such as 0-3,8")
        found.append(range(int(first), int(last if dash else first) + 1))
        if not found[-1]:
            raise ConfigError(
                f"--ranks {text!r}: {part!r} ends before it begins. Expected a list such as 0-3,8"
            )
    return found
