"""``mt-megatron scan inject``: real faults in a running job, for drills; undone when it ends."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from mt_megatron.errors import ConfigError

_HEARD_WITHIN = 10.0
_UNDONE_WITHIN = 5.0
_LOOK_SECONDS = 0.2


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    from mt_megatron.scan.drill.faults import KINDS

    kinds = []
    for kind, (meaning, figures) in KINDS.items():
        who = "ranks=1-2" if kind == "slow_link" else "rank=1"
        given = ",".join([who, *(f"{key}={value:g}" for key, value in figures.items())])
        kinds.append(f"  {kind + ':' + given:<42} {meaning}")
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inject",
        help="make faults in a running job, for drills",
        description="Make real faults in the ranks of a running, traced job: extra work, stops, waits.\n"
        "They end after --seconds, with Ctrl-C, or with the job, whichever comes first.",
        epilog="faults (figures left out are these):\n" + "\n".join(kinds) + "\n\nexample:\n"
        "  mt-megatron scan inject runs/a slow_compute:rank=3,factor=1.5 --seconds 60\n\n"
        "exit codes: 0 done and undone, 1 no rank took it up, 2 wrong use",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("faults", nargs="+", metavar="FAULT", help="KIND:rank=R[-R],FIGURE=VALUE")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long (60)")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask the ranks, wait, and take it back."""
    from mt_megatron.checkpoint.file_locks import FileLock
    from mt_megatron.scan.drill.faults import LONGEST_SECONDS, parse_fault
    from mt_megatron.scan.format.recording_end import require_recorder
    from mt_megatron.scan.format.run_files import existing_run, read_run, write_private
    from mt_megatron.scan.respond.agent import drill_log_path, drill_path

    if not 0 < args.seconds <= LONGEST_SECONDS:
        raise ConfigError(
            f"--seconds is {args.seconds:g}; expected more than 0 and at most {LONGEST_SECONDS:g}"
        )
    files = existing_run(args.run)
    world_size = int(read_run(files)["world_size"])
    faults = [parse_fault(text, world_size) for text in args.faults]
    require_recorder(files)
    path, log = drill_path(files), drill_log_path(files)
    lock = FileLock(path.with_name(f".{path.name}.lock"), create=True, mode=0o600)
    if lock.state == "busy" or (path.exists() and _still_on(path)):
        raise ConfigError(f"another drill is on in {files.root}; wait for its end, or remove {path}")
    seen = log.stat().st_size if log.exists() else 0
    until = time.time() + args.seconds
    wanted = {"until_unix": until, "faults": [fault.to_dict() for fault in faults]}
    expected = {rank for fault in faults for rank in fault.ranks}
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    on: dict[int, bool] = {}
    began = time.monotonic()
    try:
        write_private(path, json.dumps(wanted))
        while time.time() < until:
            seen = _tell(log, seen, on)
            if not on and time.monotonic() - began > _HEARD_WITHIN:
                break
            time.sleep(min(_LOOK_SECONDS, max(0.0, until - time.time())))
    except KeyboardInterrupt:
        pass
    finally:
        path.unlink(missing_ok=True)
        lock.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if not on:
        print(
            f"mt-megatron scan inject: no rank took it up within {time.monotonic() - began:.0f} s; is the "
            "job running, with its trace on?",
            file=sys.stderr,
        )
        return 1
    limit = time.monotonic() + _UNDONE_WITHIN
    seen = _tell(log, seen, on)
    while any(on.values()) and time.monotonic() < limit:
        time.sleep(_LOOK_SECONDS)
        seen = _tell(log, seen, on)
    for which, ranks in (
        ("never heard of", sorted(expected - set(on))),
        # A rank that is in a long step, or whose job has ended and took the faults with it.
        ("no word yet that it is undone", sorted(rank for rank, still in on.items() if still)),
    ):
        if ranks:
            print(f"{which}: rank {', '.join(map(str, ranks))}", file=sys.stderr)
    return 0


def _tell(log: Path, seen: int, on: dict[int, bool]) -> int:
    """Show what was logged after the first ``seen`` bytes, note it in ``on``; returns the bytes seen now."""
    if not log.exists():
        return seen
    with open(log, "rb") as file:
        file.seek(seen)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line of a full disk
            said = json.loads(line)
            on[int(said["rank"])] = bool(said["on"])
            print(f"rank {said['rank']}: {'; '.join(said['on']) or 'as before'}", flush=True)
    return seen + len(whole)


def _still_on(path: Path) -> bool:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["until_unix"]) > time.time()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
