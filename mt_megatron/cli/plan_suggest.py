"""``mt-megatron plan --suggest``: its options, and the ranked layouts as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
from typing import Any

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.hardware import DEVICES, Hardware, hardware_of
from mt_megatron.planning.layouts import Layout
from mt_megatron.planning.pipeline_layout import chunk_layer_counts
from mt_megatron.planning.suggest import Choice, Suggestion, suggest

_GIB = 2**30
_WIDTH = 120
_OVERRIDES = (
    ("tflops", "--device-tflops", "dense peak of a device in this precision, in TFLOP/s"),
    ("memory_gbps", "--device-memory-gbps", "bandwidth of a device's memory, in GB/s"),
    ("intra_node_gbps", "--intra-node-gbps", "bandwidth between devices of a node, one direction, in GB/s"),
    ("inter_node_gbps", "--inter-node-gbps", "the same between nodes, for each device"),
    ("memory_reserve", "--memory-reserve", "share of the memory left free"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``--suggest``."""
    group = parser.add_argument_group("layouts that fit a machine")
    group.add_argument("--suggest", action="store_true", help="rank layouts; needs the two that follow")
    # --world-size is an option of the plan itself.
    group.add_argument(
        "--device-memory",
        metavar="M",
        help=f"memory of a device (80GiB, 80e9), or its name: {', '.join(d.name for d in DEVICES.values())}",
    )
    group.add_argument("--devices-per-node", type=int, metavar="N", help="devices in one node (8)")
    for name, option, meaning in _OVERRIDES:
        default = getattr(DEVICES["h100"], name)
        group.add_argument(
            option, dest=name, type=float, metavar="X", help=f"{meaning} (the device's; {default:g})"
        )
    group.add_argument("--top", type=int, default=10, metavar="N", help="layouts to show (10)")


def print_suggestion(config: TrainingConfig, args: argparse.Namespace) -> int:
    """Print what ``suggest`` finds; 1 when no layout fits. Raises ``ConfigError`` for wrong options."""
    missing = [
        option
        for option, value in (("--world-size", args.world_size), ("--device-memory", args.device_memory))
        if value is None
    ]
    if missing:
        raise ConfigError(
            f"--suggest needs {' and '.join(missing)}, such as --world-size 8 --device-memory 80GiB"
        )
    if args.top < 1:
        raise ConfigError(f"--top is {args.top}; expected at least 1")
    if args.tflops is None and not (config.train.bf16 or config.train.fp16):
        raise ConfigError(
            "this run is in fp32 and the known peaks are those of bf16; expected --device-tflops with the "
            "device's fp32 peak, or --bf16"
        )
    hardware = hardware_of(
        args.device_memory,
        devices_per_node=args.devices_per_node,
        **{name: getattr(args, name) for name, _, _ in _OVERRIDES},
    )
    found = suggest(config, args.world_size, hardware, expert_imbalance=args.expert_imbalance)
    if args.json:
        print(json.dumps(as_data(found, args.config_argv, args.top), indent=2))
    else:
        _show(found, args.config_argv, args.top)
    return 0 if found.choices else 1


def as_data(found: Suggestion, argv: list[str], top: int) -> dict[str, Any]:
    """The suggestion as plain data."""
    miss = found.near_miss
    return {
        "model": found.config.model.preset,
        "world_size": found.world_size,
        "assumptions": dataclasses.asdict(found.hardware),
        "assumed_options": found.assumed,
        "expert_imbalance_assumed": found.expert_imbalance,
        "considered": found.considered,
        "fitting": found.fitting,
        "layouts": [_choice_data(choice, found, argv) for choice in found.choices[:top]],
        "rejected": [dataclasses.asdict(each) for each in found.rejected],
        "too_large": found.too_large,
        "nearest_miss": None
        if miss is None
        else {
            "options": miss.layout.options(),
            "needs_bytes": miss.needs_bytes,
            "usable_bytes": int(miss.usable_bytes),
        },
        "advice": found.advice,
    }


def _choice_data(choice: Choice, found: Suggestion, argv: list[str]) -> dict[str, Any]:
    layout, stages = choice.layout, choice.layout.pipeline
    counts = chunk_layer_counts(layout.apply(found.config))
    ends: dict[str, int | None] = {"first_layers": None, "last_layers": None}
    if layout.balanced:
        ends = {"first_layers": sum(counts[::stages]), "last_layers": sum(counts[stages - 1 :: stages])}
    return {
        "layout": dataclasses.asdict(layout) | ends | {"layers_per_chunk": list(counts)},
        "options": choice.layout.options(),
        "command": command(choice.layout, found, argv),
        "memory_per_rank_bytes": choice.memory.as_dict(),
        "step_seconds_estimate": choice.cost.as_dict(),
        "mfu_estimate": choice.mfu,
        "tokens_per_second_estimate": choice.tokens_per_second,
    }


def command(layout: Layout, found: Suggestion, argv: list[str]) -> str:
    """A line for the shell that starts the run in this layout; options come last, where they win."""
    options = [*argv, *(word for each in found.assumed for word in each.split()), *layout.options()]
    per_node = _processes_per_node(layout.tensor, found)
    words = ["mt-megatron", "launch", "--gpus-per-node", str(per_node)]
    if found.world_size > per_node:
        words += ["--print", "slurm", "--nodes", str(-(-found.world_size // per_node))]
    return shlex.join([*words, "--", *options])


def _processes_per_node(tensor: int, found: Suggestion) -> int:
    """The most that all nodes can have alike, with whole tensor-parallel groups."""
    most = min(found.world_size, found.hardware.devices_per_node)
    alike = [count for count in range(1, most + 1) if found.world_size % count == 0]
    return max((count for count in alike if count % tensor == 0), default=alike[-1])


def _show(found: Suggestion, argv: list[str], top: int) -> None:
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else max(_WIDTH, shutil.get_terminal_size().columns)
    console = Console(width=width, highlight=False, markup=False, soft_wrap=True)
    for line in _heading(found):
        console.print(line)
    if found.choices:
        experts = found.config.model.num_moe_experts is not None
        columns = [name for name in _COLUMNS if experts or name != "EP"]
        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for choice in found.choices[:top]:
            table.add_row(*(_row(choice)[name] for name in columns))
        console.print(table)
        more = len(found.choices) - top
        if more > 0:
            console.print(f"and {more} more (--top {len(found.choices)} shows them)")
        console.print(f"\nThe first one, with what is still missing to be added ({_missing(found, argv)}):")
        console.print("  " + command(found.choices[0].layout, found, argv))
    else:
        console.print("No layout fits.")
    for line in _why_not(found):
        console.print(line)


def _missing(found: Suggestion, argv: list[str]) -> str:
    """Options that the command needs and lacks, and those that only seem to lack."""
    lr, train = found.config.optimizer.lr, found.config.train
    lacking = "data, steps, --save" if lr is not None else "data, steps, --lr, --save"
    given = {word.partition("=")[0] for word in argv}
    inherited = [] if lr is None or "--lr" in given else [f"--lr {lr:g}"]
    inherited += [
        f"--{name}" for name in ("bf16", "fp16") if getattr(train, name) and f"--{name}" not in given
    ]
    source = "the preset" if found.config.model.preset is not None else "the configuration"
    return f"{lacking}; {' and '.join(inherited)} from {source}" if inherited else lacking


_COLUMNS = (
    "TP",
    "PP",
    "VPP",
    "CP",
    "EP",
    "DP",
    "micro",
    "SP",
    "dist. opt.",
    "recompute",
    "memory",
    "step",
    "bubble",
    "MFU",
)


def _heading(found: Suggestion) -> list[str]:
    device: Hardware = found.hardware
    model = found.config.model.preset or "model"
    train = found.config.train
    lines = [
        f"{model} on {found.world_size} x {device.name}: {found.considered} layouts considered, "
        f"{found.fitting} variants fit",
        (
            f"global batch {train.global_batch_size} sequences of {train.seq_length} tokens; "
            f"{device.usable_bytes / _GIB:.1f} of {device.memory_bytes / _GIB:.1f} GiB usable; "
            f"{device.tflops:g} TFLOP/s peak, of which {device.matrix_efficiency:.0%} in matrix products; "
            f"{device.intra_node_gbps:g} GB/s in a node of {device.devices_per_node}, "
            f"{device.inter_node_gbps:g} GB/s between nodes"
        ),
        "Step time and MFU are estimates of a cost model, not measurements.",
    ]
    lines += [f"assumed: {option}" for option in found.assumed]
    return [*lines, ""]


def _row(choice: Choice) -> dict[str, str]:
    """The cells of one layout, by column."""
    layout, cost = choice.layout, choice.cost
    recompute = layout.recompute
    parts = ["latents"] * recompute.mla_up_proj + ["experts"] * recompute.moe_layer
    how: str = recompute.granularity or " + ".join(parts) or "none"
    if recompute.granularity == "full":
        how = f"{recompute.method} {recompute.num_layers}"
    sizes = (layout.tensor, layout.pipeline, layout.chunks, layout.context, layout.expert, layout.data)
    cells = [
        *map(str, (*sizes, layout.micro_batch)),
        "yes" if layout.sequence_parallel else "no",
        "yes" if layout.distributed_optimizer else "no",
        how,
        f"{choice.memory.total / _GIB:.1f} GiB",
        f"{cost.total:.3g} s",
        f"{cost.bubble / cost.total:.0%}",
        f"{choice.mfu:.1%}",
    ]
    return dict(zip(_COLUMNS, cells, strict=True))


def _why_not(found: Suggestion) -> list[str]:
    lines: list[str] = []
    if found.rejected or found.too_large:
        lines += ["", "The others:" if found.choices else "Why not:"]
    for each in found.rejected:
        lines.append(f"  {each.count:>5} break a rule: {each.example}")
    if found.too_large and found.near_miss is not None:
        miss = found.near_miss
        lines.append(
            f"  {found.too_large:>5} need too much memory, the nearest {miss.needs_bytes / _GIB:.1f} of "
            f"{miss.usable_bytes / _GIB:.1f} GiB: {' '.join(miss.layout.options())}"
        )
    return lines + [f"  what would fit: {line}" for line in found.advice]
