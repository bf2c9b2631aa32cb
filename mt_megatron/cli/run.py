"""``mt-megatron run``: any script that uses Megatron-Core, unchanged, on another device."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mt_megatron import _session
from mt_megatron.errors import BackendError, ConfigError, RunError, UpstreamVersionError
from mt_megatron.launching.scripts.choice import (
    BACKEND,
    CPU_BF16_PRODUCTS,
    LOG_FOLDER,
    MEGASCAN,
    MEGASCOPE,
    MEGASCOPE_INTERVAL,
    RUN_DIR,
    SCHEDULE,
    TRANSPORT,
    Choice,
    Recorded,
    recorded_of,
)
from mt_megatron.launching.scripts.script import find, rendezvous_defaults
from mt_megatron.seams.transport import COLLECTIVE, NAMES, check


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        description="Run a script, or a module, with Megatron-Core patched. Megatron, the script, the\n"
        "modules beside it and those below every --redirect folder see the backend where they say cuda;\n"
        "all other libraries see the machine as it is. So do the processes that it starts.\n"
        "Without torchrun the script is a run of one process.",
        usage="mt-megatron run [--backend NAME] [--redirect FOLDER ...] [--pipeline-schedule NAME]\n"
        "                       [--p2p-transport NAME] [--cpu-bf16-products torch|fp32]\n"
        "                       [--megascan LEVEL] [--megascope record|live] [--run-dir RUN]\n"
        "                       -- SCRIPT|-m MODULE [ARGS ...]",
        epilog="examples:\n"
        "  mt-megatron run --backend cpu -- pretrain_gpt.py --mock-data --transformer-impl local ...\n"
        "  torchrun --nproc-per-node 2 -m mt_megatron.cli run --backend cpu -- pretrain_gpt.py ...\n"
        "  mt-megatron run --backend cpu --redirect tests -- -m pytest tests\n\n"
        "exit codes: the script's own; 2 when it was not started",
    )
    parser.add_argument(
        "--backend",
        default=None,
        metavar="NAME",
        help=f"cpu, cuda, musa or another installed one (default: ${BACKEND}, else auto)",
    )
    parser.add_argument(
        "--redirect", action="append", default=[], metavar="FOLDER", help="also redirect the modules below it"
    )
    # The former name, which training gives to its recordings.
    parser.add_argument("--scope", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument(
        "--pipeline-schedule",
        default=None,
        metavar="NAME",
        help=f"order of a step's passes where the script has a pipeline: 1f1b, zb_h1 ..., NAME:NUMBER, a "
        f"FILE.csv or auto (default: ${SCHEDULE}, else Megatron-Core's own)",
    )
    parser.add_argument(
        "--pipeline-log",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="where auto logs its decisions, for mt-megatron pipeline explain FOLDER (nowhere)",
    )
    parser.add_argument(
        "--p2p-transport",
        default=None,
        metavar="NAME",
        help=f"what carries activations and gradients between pipeline stages: {', '.join(NAMES)} (default: "
        f"${TRANSPORT}, else {COLLECTIVE}, Megatron-Core's own way)",
    )
    parser.add_argument(
        "--cpu-bf16-products",
        default=None,
        metavar="NAME",
        help=f"kernels of the linears' bf16 products on a CPU: torch, or fp32 where the processor has none "
        f"for bf16 (default: ${CPU_BF16_PRODUCTS}, else torch)",
    )
    parser.add_argument(
        "--megascan",
        default=None,
        metavar="LEVEL",
        help=f"trace every rank into RUN/scan: base, full or kernel, as training's --scan (default: "
        f"${MEGASCAN}, else off)",
    )
    parser.add_argument(
        "--megascope",
        default=None,
        metavar="HOW",
        help=f"record the model's inside into RUN/scope: record, or live with a page, as training's --scope "
        f"(default: ${MEGASCOPE}, else off)",
    )
    parser.add_argument(
        "--megascope-interval",
        default=None,
        metavar="STEPS",
        help=f"from one recording of the statistics to the next (default: ${MEGASCOPE_INTERVAL}, else 20)",
    )
    parser.add_argument(
        "--run-dir", default=None, metavar="RUN", help=f"folder of what is recorded (default: ${RUN_DIR})"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Check what can be checked without torch, then become the script's interpreter."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    script = find(command)
    if args.scope:
        print("mt-megatron: --scope FOLDER is now called --redirect FOLDER", file=sys.stderr)
    folders = [_existing(folder) for folder in (*args.redirect, *args.scope)]
    backend = args.backend or os.environ.get(BACKEND) or "auto"
    _check_backend(backend)
    schedule = _schedule(args.pipeline_schedule or os.environ.get(SCHEDULE))
    sys.path.insert(0, script.path0)  # where the script will look for Megatron
    try:
        _session.check_upstream_version()
    except UpstreamVersionError as error:
        raise RunError(str(error)) from error
    _check_interpreter()
    if script.folder is not None:
        folders.insert(0, script.folder)
    elif not folders:
        print(
            f"mt-megatron: {command[1]} is installed, so it is not redirected itself; "
            f"name the folders of your own modules with --redirect",
            file=sys.stderr,
        )
    choice = Choice(
        backend=backend,
        folders=tuple(dict.fromkeys(folders)),
        schedule=schedule,
        transport=_transport(args.p2p_transport or os.environ.get(TRANSPORT)),
        cpu_bf16_products=args.cpu_bf16_products or os.environ.get(CPU_BF16_PRODUCTS) or None,
        recorded=_recorded(args),
    )
    environment = choice.environment({**os.environ, **rendezvous_defaults(os.environ)})
    if args.pipeline_log is not None:
        environment[LOG_FOLDER] = str(args.pipeline_log.resolve())
    sys.stdout.flush()
    sys.stderr.flush()
    # The process stays the same for who waits for it, and runs the script as python itself does:
    # arguments, path, tracebacks, signals and exit codes are python's.
    os.execve(
        sys.executable,
        [sys.executable, *_interpreter_options(), *script.arguments],
        environment,
    )


def _existing(folder: str) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise RunError(f"--redirect {folder}: no such folder here ({os.getcwd()})")
    return path.resolve()


def _check_backend(name: str) -> None:
    from mt_megatron.backends import registry

    try:
        registry.check_name(name)
    except BackendError as error:
        raise RunError(str(error)) from error


def _schedule(text: str | None) -> str | None:
    """``text`` where it is a schedule, with a file's whole path, since the script may change folders."""
    if not text:
        return None
    from mt_megatron.pipeline.choice import parse

    if text.endswith(".csv"):
        text = str(Path(text).resolve())
    try:
        parse(text)
    except ConfigError as error:
        raise RunError(str(error)) from error
    return text


def _transport(text: str | None) -> str | None:
    """``text`` where it is the name of a transport."""
    try:
        return check(text) if text else None
    except ConfigError as error:
        raise RunError(str(error)) from error


def _recorded(args: argparse.Namespace) -> Recorded | None:
    """What is to be recorded, by options before variables."""
    given = {
        MEGASCAN: args.megascan,
        MEGASCOPE: args.megascope,
        MEGASCOPE_INTERVAL: args.megascope_interval,
        RUN_DIR: args.run_dir,
    }
    options = {name: text for name, text in given.items() if text is not None}
    try:
        found = recorded_of({**os.environ, **options})
    except ConfigError as error:
        raise RunError(str(error)) from error
    if found is None and args.run_dir is not None:
        raise RunError("--run-dir has nothing to hold: give --megascan base, --megascope live, or both")
    if args.megascope_interval is not None and (found is None or found.scope == "off"):
        raise RunError("--megascope-interval applies to MegaScope alone: give --megascope record or live too")
    return found


def _check_interpreter() -> None:
    flags = sys.flags
    if flags.isolated or flags.ignore_environment or flags.no_site:
        raise RunError(
            "python was started with -I, -E or -S, and with them it reads neither PYTHONPATH nor "
            "sitecustomize, through which the script is patched: start it without"
        )


def _interpreter_options() -> list[str]:
    import subprocess

    # What multiprocessing gives its children: -O, -W, -X and the like.
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return options
