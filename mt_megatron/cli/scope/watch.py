"""``mt-megatron scope watch``: ask the ranks of a run for tensors and further statistics."""

from __future__ import annotations

import argparse
import contextlib
from importlib import import_module
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError, ScopeError

_EXAMPLE = """examples:
  mt-megatron scope watch RUN "attention@decoder.layers.3.self_attention:heads=0,1:every=1"
  mt-megatron scope watch RUN "activation@decoder.layers.*.mlp" "router@decoder.layers.*" --add
  mt-megatron scope watch RUN
  mt-megatron scope watch RUN --clear

exit codes: 0 fine, 2 wrong use or no such recording"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "watch",
        help="ask the ranks of a run for tensors and further statistics",
        description="Ask the ranks of a run for more than the default statistics, from one of the next\n"
        "steps on and until it is taken back. Each REQUEST is KIND@MODULE_PATTERN[:option=value]...;\n"
        "without one the requests in force are shown. docs/30-scope.md has the kinds and options.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("requests", metavar="REQUEST", nargs="*", help="instead of those in force")
    parser.add_argument("--add", action="store_true", help="besides those in force")
    parser.add_argument("--clear", action="store_true", help="take all requests back")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the requests; returns the exit code."""
    from mt_megatron.scope.recording.files import existing_recording, read_requests, write_requests

    if args.clear and (args.requests or args.add):
        raise ConfigError("--clear takes all requests back; expected no REQUEST and no --add beside it")
    files = existing_recording(args.run)
    if not args.requests and not args.clear:
        found = read_requests(files)
        print("\n".join(found) if found else "nothing is asked for besides the defaults")
        return 0
    requests = import_module("mt_megatron.scope.watch.requests")
    for text in args.requests:
        requests.parse(text)
    texts = write_requests(files, args.requests, add=args.add)
    print(
        f"{len(texts)} request{'s' * (len(texts) != 1)} in {files.requests}: a run that trains takes them "
        "within seconds"
    )
    for line in requests.all_unknown(args.requests, _paths(files)):
        print(f"so far {line}")
    return 0


def _paths(files: Any) -> list[str]:
    """Modules of the model; none where the recording has not got as far."""
    from mt_megatron.scope.recording.reader import open_recording

    try:
        with contextlib.closing(open_recording(files.root)) as recording:
            return [each.path for each in recording.modules() if each.path]
    except ScopeError:
        return []
