"""``mt-megatron scope open``: the page on a recording, without training."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError

_EXAMPLE = """examples:
  mt-megatron scope open RUN
  mt-megatron scope open RUN --port 8700

exit codes: 0 ended with Ctrl-C, 1 the page cannot be served or there is no such recording, 2 wrong use"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "open",
        help="serve the page on a recording and print its address",
        description="Serve the page on a run's recording, on loopback only, and print the address that\n"
        "opens it, until Ctrl-C. A run that trains serves its own page.\n"
        "Needs: pip install 'mt_megatron[scope]'",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1 (a free one)")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="write the address with its token here, too"
    )
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    from mt_megatron.scope.recording.files import existing_recording
    from mt_megatron.scope.recording.reader import open_recording
    from mt_megatron.scope.sidecar.hub import ServeOptions, recording_hub
    from mt_megatron.scope.sidecar.sidecar import served

    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port is {args.port}; expected 0 (a free one) to 65535")
    files = existing_recording(args.run)
    open_recording(args.run).close()  # a damaged file is told before anything listens

    def say(text: str) -> None:
        print(text, flush=True)

    options = ServeOptions(run=files.root.parent, port=args.port, token_file=args.token_file, say=say)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(served(recording_hub(files), options))
        # It serves until it is cancelled: it has told why it does not.
        print("mt-megatron: the page is not served", file=sys.stderr)
        return 1
    return 0
