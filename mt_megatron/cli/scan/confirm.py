"""``mt-megatron scan confirm``: one second of paired measurement in a running job."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "confirm",
        help="measure whether a suspect rank or link is slower, in a running job",
        description="Have all ranks of a running, traced job measure for about a second, between two steps:\n"
        "suspects and others do the same at the same time, and only the ratios count.",
        epilog="examples:\n  mt-megatron scan confirm runs/a --ranks 3\n"
        "  mt-megatron scan confirm runs/a --link 1 2\n\n"
        "exit codes: 0 measured and refuted or inconclusive, 1 confirmed or no answer, 2 wrong use",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    suspects = parser.add_mutually_exclusive_group(required=True)
    suspects.add_argument("--ranks", type=int, nargs="+", metavar="R", help="suspects of slow computing")
    suspects.add_argument(
        "--link",
        type=int,
        nargs=2,
        metavar="R",
        help="the two ends of a suspect link; between hosts the more suspect first",
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="wait so long (120)")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask, wait for the answer, show it."""
    from mt_megatron.scan.format.recording_end import require_recorder
    from mt_megatron.scan.format.run_files import existing_run, read_run, write_private
    from mt_megatron.scan.respond.agent import measurements_path, request_path
    from mt_megatron.scan.respond.confirm import Request, check_request

    if not args.timeout > 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; expected more than 0 seconds")
    files = existing_run(args.run)
    request = Request(
        identity=uuid.uuid4().hex[:12],
        what="compute" if args.ranks else "link",
        ranks=tuple(args.ranks or args.link),
    )
    check_request(request, int(read_run(files)["world_size"]))
    require_recorder(files)
    path = request_path(files)
    deadline = time.monotonic() + args.timeout
    with _alone(files.root / ".measure.lock", deadline) as alone:
        if not alone:
            print(
                "mt-megatron scan confirm: another measurement of this run has had no answer for "
                f"{args.timeout:g} s",
                file=sys.stderr,
            )
            return 1
        try:
            write_private(path, request.to_json())
            found = _answer(measurements_path(files), request.identity, deadline)
        finally:
            path.unlink(missing_ok=True)
    if found is None:
        print(
            f"mt-megatron scan confirm: no answer within {args.timeout:g} s; is the job training, with its "
            "trace on?",
            file=sys.stderr,
        )
        return 1
    print(found["text"])
    return int(found["verdict"] == "confirmed")


@contextlib.contextmanager
def _alone(path: Path, deadline: float) -> Iterator[bool]:
    """Whether nobody else asks this run for a measurement: there is one place for it. Waits for others."""
    from mt_megatron.checkpoint.file_locks import FileLock

    lock = FileLock(path, create=True, mode=0o600)
    while lock.state == "busy" and time.monotonic() < deadline:
        lock.close()
        time.sleep(0.1)
        lock = FileLock(path, create=True, mode=0o600)
    with lock:
        yield lock.state != "busy"


def _answer(path: Path, identity: str, deadline: float) -> dict[str, Any] | None:
    while time.monotonic() < deadline:
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # half a line: of a full disk, or one being written
                    found: dict[str, Any] = json.loads(line)
                    if found["identity"] == identity:
                        return found
        time.sleep(0.2)
    return None
