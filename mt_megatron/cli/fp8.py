"""``mt-megatron fp8``: which layers compute in FP8, in what, and what it costs them."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.files import (
    iteration_of,
    latest_checkpoint,
    resolve_checkpoint,
    run_root,
    save_folder,
)
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.fp8.recipe import NATIVE, PRESETS, ROLES
from mt_megatron.planning.fp8_report import fp8_report, require_recipe
from mt_megatron.training.init_from_hf import load_run
from mt_megatron.training.logging.fp8_picture import picture
from mt_megatron.training.logging.fp8_records import telemetry_files
from mt_megatron.training.logging.metrics import DEFAULT_NAME, read_records

_CODES = "exit codes: 0 fine, 2 wrong use"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fp8",
        description="FP8 recipes, and what of a model computes in them.",
        epilog="examples:\n  mt-megatron fp8 recipes\n  mt-megatron fp8 report runs/llama3\n"
        f"  mt-megatron fp8 report --model llama3_8b --fp8-recipe blockwise --json\n\n{_CODES}",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    one = actions.add_parser(
        "recipes",
        help="the presets, their casts, and which devices compute them",
        description="The presets, their casts, and which devices compute them.",
        epilog=f"example:\n  mt-megatron fp8 recipes\n\n{_CODES}",
    )
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one = actions.add_parser(
        "report",
        help="layer by layer: in what it computes, or why it stays in bf16",
        description="Layer by layer: in what it computes, or why it stays in bf16; of a run also what its "
        "casts lost.\nTakes a run's folder, one of its checkpoints (and then what was known at its step), a "
        "YAML file,\nor the options of mt-megatron pretrain.",
        epilog="examples:\n  mt-megatron fp8 report runs/llama3 --picture fp8.svg\n"
        "  mt-megatron fp8 report runs/llama3/iter_0000100\n"
        f"  mt-megatron fp8 report --model llama3_8b --fp8-recipe blockwise\n\n{_CODES}",
    )
    one.usage = (
        "mt-megatron fp8 report [RUN | CHECKPOINT | CONFIG.yaml] [--json] [--picture FILE] "
        "[options of pretrain]"
    )
    one.add_argument("--run", metavar="RUN", help="folder of a run or checkpoint, or YAML; may come first")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--picture", metavar="FILE", help="draw the telemetry as SVG")
    one.set_defaults(config_arguments=True, leading_word="--run")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Do what was asked; returns the exit code."""
    if args.action == "recipes":
        return _recipes(args)
    config, metrics, until = _of(args)
    require_recipe(config)
    files = [] if metrics is None else telemetry_files(metrics)
    records = [
        record for path in files for record in read_records(path) if until is None or record["step"] <= until
    ]
    if args.picture:
        if not records:
            raise ConfigError(
                "the run has no FP8 telemetry to draw; expected a run with --fp8-telemetry-interval N and "
                "--save or --metrics-path"
            )
        Path(args.picture).write_text(picture(records), encoding="utf-8")
    found = fp8_report(config, records)
    print(json.dumps(found, indent=2) if args.json else text_of(found))
    return 0


def _of(args: argparse.Namespace) -> tuple[TrainingConfig, Path | None, int | None]:
    """The configuration, where the run's metrics are, and the checkpoint's step where one was named."""
    argv: list[str] = args.config_argv
    if args.run is None:
        if not argv:
            raise ConfigError("no run and no model is given; expected a run's folder or --model NAME")
        return load_run(argv), None, None
    path = Path(args.run)
    if path.is_file():
        return load_config(argv, path), None, None
    iteration = iteration_of(path) if path.is_dir() else None
    if iteration is not None:
        # A single checkpoint: its run's folder has the metrics.
        newest, path = resolve_checkpoint(path), path.resolve().parent
    else:
        path = save_folder(run_root(path))
        found = latest_checkpoint(path) if path.is_dir() else None
        if found is None:
            raise ConfigError(
                f"{path} holds no checkpoint, whose config.yaml tells the recipe; expected the folder of "
                "--save or of one of its checkpoints, a YAML file, or the options of the run"
            )
        newest = found
    config = load_config(argv, newest / "config.yaml")
    named = config.logging.metrics_path
    own = run_root(path) / DEFAULT_NAME
    # A run's folder may have been moved since.
    return config, Path(named) if named is not None and not own.is_file() else own, iteration


def _recipes(args: argparse.Namespace) -> int:
    table: dict[str, dict[str, Any]] = {}
    for name, recipe in PRESETS.items():
        devices = ["cpu (emulated)"]
        devices += [f"{row.device} from {row.capability}" for row in NATIVE if name in row.recipes]
        table[name] = {
            "casts": {role: [recipe.product(role).a.text, recipe.product(role).b.text] for role in ROLES},
            "scaling": recipe.scaling,
            "devices": devices,
            "as": recipe.source,
        }
    if args.json:
        print(json.dumps(table, indent=2))
        return 0
    for name, row in table.items():
        print(f"{name}: {row['as']}; {row['scaling']} scaling; {', '.join(row['devices'])}")
        for role, (a, b) in row["casts"].items():
            print(f"    {role}  {a}  x  {b}")
    return 0


def text_of(found: dict[str, Any]) -> str:
    """The report as text: layers that are alike share a line."""
    lines = [
        f"recipe {found['recipe']}: {100 * found['share']:.1f} % of the operations of the decoder's linears "
        "are in FP8"
    ]
    for role, operands in found["roles"].items():
        lines.append(f"  {role}  " + "  x  ".join(f"{kind} {cast}" for kind, cast in operands.items()))
    groups: dict[tuple[str, str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in found["linears"]:
        _, layer, name = row["linear"].split(".", 2)
        groups[name, row["reason"] or "FP8", row["inputs"], row["outputs"]].append(
            {**row, "layer": int(layer)}
        )
    lines.append("")
    lines.append(f"  {'linear':<38}{'layers':<16}{'sizes':>16}{'share':>9}  computes in")
    for (name, what, inputs, outputs), rows in groups.items():
        share = sum(row["share"] for row in rows)
        what = "FP8" if what == "FP8" else f"bf16: {what}"
        lines.append(
            f"  {name:<38}{_ranges([row['layer'] for row in rows]):<16}{f'{inputs} x {outputs}':>16}"
            f"{100 * share:>8.1f}%  {what}"
        )
    head = found["output_layer"]
    what = "FP8" if head["reason"] is None else f"bf16: {head['reason']}"
    lines.append(
        f"  {'output_layer':<38}{'':<16}{'{inputs} x {outputs}'.format(**head):>16}"
        f"{100 * head['share']:>8.1f}%  {what}, beside the linears' 100 %"
    )
    lines += [f"  {name:<38}{'':<41}  bf16: {why}" for name, why in found["always_bf16"].items()]
    worst = [
        (record["snr"], name, operand, record)
        for name, row in [*((row["linear"], row) for row in found["linears"]), ("output_layer", head)]
        for operand, record in row["telemetry"].items()
    ]
    if worst:
        lines += ["", "  lowest SNR in the newest samples:"]
        for snr, linear, operand, record in sorted(worst, key=lambda each: each[0])[:8]:
            lines.append(
                f"    {linear}, {operand}: {snr:.1f} dB, underflow {100 * record['underflow']:.3f} %, "
                f"saturation {100 * record['saturation']:.3f} %, step {record['step']}"
            )
    else:
        lines += ["", "  no telemetry: --fp8-telemetry-interval N records what the casts lose"]
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2, 5``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in found)
