"""``mt-megatron diverge``: name the first module at which two runs of the same step part."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

from mt_megatron.cli.progress import ConsoleProgress
from mt_megatron.errors import ConfigError

_MARKER = "diverge.json"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "diverge",
        description="Run one step twice, from the same weights on the same batch: on two backends, in two\n"
        "layouts, in two dtypes, or with your own code on one side. Compare every module's output, the\n"
        "gradients and the updated weights, and name the first that differs. All other options are those of\n"
        "pretrain and hold for both sides.\n"
        "Exit code 0: no difference beyond rounding. 1: a difference, or a side that failed. 2: wrong use.",
        epilog="example:\n"
        "  mt-megatron diverge --a cpu --b cuda --model llama3_tiny --mock-data --global-batch-size 2 \\\n"
        "    --lr 1e-3\n"
        "  mt-megatron diverge --a cpu --b cpu --config tiny.yaml \\\n"
        "    --b-flags='--tensor-model-parallel-size 2'\n"
        "  mt-megatron diverge --a cpu --b cpu --config tiny.yaml --b-import ./my_attention.py",
    )
    for side in "ab":
        parser.add_argument(f"--{side}", required=True, metavar="BACKEND", help=f"backend of side {side}")
    for side in "ab":
        parser.add_argument(
            f"--{side}-flags",
            default="",
            metavar="FLAGS",
            help=f"options of side {side} alone, one word: ='...'",
        )
        parser.add_argument(
            f"--{side}-processes",
            type=int,
            metavar="N",
            help=f"processes of side {side} (default: the fewest its parallel sizes need)",
        )
        parser.add_argument(
            f"--{side}-import",
            action="append",
            default=[],
            metavar="MODULE",
            help=f"module or .py file to import on side {side} before its model is built; repeatable",
        )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/diverge"),
        metavar="DIR",
        help="records and report (%(default)s)",
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="error of an output that is still rounding"
    )
    parser.add_argument("--gradient-tolerance", type=float, metavar="X", help="the same for gradients")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="for each side (%(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(func=run, config_arguments=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run both sides, compare, report. Returns 0 without a difference, 1 with one."""
    from mt_megatron.diverge.side import check_devices, check_pair, make_side

    a, b = (
        make_side(
            side,
            backend=getattr(args, side),
            common=args.config_argv,
            own=shlex.split(getattr(args, f"{side}_flags")),
            processes=getattr(args, f"{side}_processes"),
            imports=getattr(args, f"{side}_import"),
        )
        for side in "ab"
    )
    notes = check_pair(a, b)
    check_devices(a, b)
    folder = _prepare(args.output)
    # Not earlier: torch takes seconds to import, and the checks above need none of it.
    from mt_megatron.diverge.compare import compare, read_record
    from mt_megatron.diverge.picture import draw
    from mt_megatron.diverge.processes import run_side
    from mt_megatron.diverge.report import as_json, as_markdown, jump, verdict

    with _Progress() as progress:
        for side in (a, b):
            began = time.monotonic()
            counted = "1 process" if side.processes == 1 else f"{side.processes} processes"
            progress.say(f"side {side.name}: {side.backend}, {counted} ...")
            run_side(side, folder, args.timeout, progress.advance if progress.has_bar else None)
            progress.say(f"side {side.name}: done in {time.monotonic() - began:.0f} s")
    progress.say("comparing")
    found = compare(
        read_record(folder / "a", a.processes),
        read_record(folder / "b", b.processes),
        tolerance=args.tolerance,
        gradient_tolerance=args.gradient_tolerance,
        notes=notes,
    )
    _remove_records(folder)
    document = as_json(found, a, b)
    counts = ["1 process" if side.processes == 1 else f"{side.processes} processes" for side in (a, b)]
    title = f"a: {a.backend}, {counts[0]}; b: {b.backend}, {counts[1]}"
    (folder / "picture.svg").write_text(draw(found, title), encoding="utf-8")
    (folder / "report.md").write_text(as_markdown(found, a, b, "picture.svg"), encoding="utf-8")
    (folder / "report.json").write_text(
        json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    if args.json:
        print(json.dumps(document))
    else:
        print(verdict(found))
        for note in (*found.notes, *filter(None, [jump(found)])):
            print(f"note: {note}")
        print(f"report: {folder / 'report.md'}")
    return 0 if found.first is None else 1


class _Progress(ConsoleProgress):
    """Outputs and gradients of modules that a side has computed."""

    command = "diverge"

    def advance(self, done: int, total: int) -> None:
        """How far a side is; ``total`` is 0 before its step."""
        self.show(
            time.monotonic(),
            done,
            total,
            f"{done} of {total} outputs and gradients of modules" if total else "building the model",
        )


def _remove_records(folder: Path) -> None:
    """The report says what was found; the tensors of both sides and the initial weights are as large as
    several models."""
    import shutil

    for record in (*folder.glob("[ab]/rank_*.pt"), *folder.glob("[ab]/rank_*.progress")):
        record.unlink()
    shutil.rmtree(folder / "initial", ignore_errors=True)


def _prepare(folder: Path) -> Path:
    """An empty place for this comparison: an earlier one's files go, anybody else's stay."""
    import shutil

    marker = folder / _MARKER
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise ConfigError(
            f"{folder} holds files that are not an earlier comparison's; give --output another folder"
        )
    if folder.exists():
        for name in ("a", "b", "initial", "index_cache"):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text('{"made_by": "mt-megatron diverge"}\n', encoding="utf-8")
    return folder.resolve()
