"""``mt-megatron plan``: parameters, operations and memory of a run, and layouts that fit a machine."""

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
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.flops import executed_flops, forward_flops
from mt_megatron.planning.fp8_report import fp8_cost
from mt_megatron.planning.hardware import DEVICES, Hardware, hardware_of
from mt_megatron.planning.layouts import Layout
from mt_megatron.planning.memory import PARTS, MemoryCase, chunk_layers, estimate_memory, places, state_memory
from mt_megatron.planning.memory_estimate import DEFAULT_IMBALANCE, memory_case, padded_shape
from mt_megatron.planning.parameters import ParameterCount, count_parameters
from mt_megatron.planning.pipeline_layout import chunk_layer_counts
from mt_megatron.planning.suggest import Choice, Suggestion, suggest
from mt_megatron.planning.validate.experts import expert_problems
from mt_megatron.planning.validate.fp8 import fp8_layer_problems
from mt_megatron.planning.validate.model import model_problems
from mt_megatron.planning.validate.parallel import parallel_problems
from mt_megatron.training.init_from_hf import check_published, load_run

# ``--suggest``: its options, and the ranked layouts as a table or as JSON.

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
    shape = model_shape(config)
    layer = count_parameters(shape).total // shape.num_layers
    if 0 < args.world_size * hardware.memory_bytes < layer:
        raise ConfigError(
            f"--device-memory is {args.device_memory}: {hardware.memory_bytes:g} bytes a device, and a "
            f"layer has {layer:,} parameters; expected the memory with its unit, such as 24GiB, or one of "
            f"{', '.join(device.name for device in DEVICES.values())}"
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
            "options": miss.layout.options(found.config),
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
        "options": choice.layout.options(found.config),
        "command": command(choice.layout, found, argv),
        "memory_per_rank_bytes": choice.memory.as_dict(),
        "step_seconds_estimate": choice.cost.as_dict(),
        "mfu_estimate": choice.mfu,
        "tokens_per_second_estimate": choice.tokens_per_second,
    }


def command(layout: Layout, found: Suggestion, argv: list[str]) -> str:
    """A line for the shell that starts the run in this layout; options come last, where they win."""
    options = [
        *argv,
        *(word for each in found.assumed for word in each.split()),
        *layout.options(found.config),
    ]
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
        f"{model} on {found.world_size} x {device.name}: {found.considered} layouts considered, of which "
        f"{found.fitting} variants (micro-batches, recomputation) fit; near-equals are left out",
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
            f"{miss.usable_bytes / _GIB:.1f} GiB: {' '.join(miss.layout.options(found.config))}"
        )
    return lines + [f"  what would fit: {line}" for line in found.advice]


# The subcommand.

_GIB = 2**30


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        description="Count a model's parameters exactly, per kind of module, and what a step of training\n"
        "takes: floating-point operations and the memory of each rank. Nothing is built.\n"
        "Takes --model NAME or --init-from-hf DIR, and every other option of mt-megatron pretrain.",
        epilog="examples:\n  mt-megatron plan --model llama3_8b --json\n"
        "  mt-megatron plan --model llama3_70b --tensor-model-parallel-size 8 --sequence-parallel \\\n"
        "    --pipeline-model-parallel-size 4 --world-size 64 --global-batch-size 512\n"
        "  mt-megatron plan --model llama3_70b --suggest --world-size 64 --device-memory 80GiB\n"
        "  mt-megatron plan --model deepseek_v3 --suggest --world-size 512 --device-memory H100",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="processes of the run (tensor x pipeline x context x expert parallel size)",
    )
    parser.add_argument(
        "--expert-imbalance",
        type=float,
        default=DEFAULT_IMBALANCE,
        metavar="X",
        help="tokens that the busiest expert-parallel rank is assumed to receive, over their mean, where no "
        f"capacity limits them ({DEFAULT_IMBALANCE:g})",
    )
    add_options(parser)
    parser.set_defaults(func=run, config_arguments=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises ``ConfigError`` when the model is not described completely.

    Returns 1 when layouts were asked for and none fits.
    """
    if not args.config_argv:
        raise ConfigError(
            "no model is given. Name a preset, such as --model llama3_8b, or a published model with "
            "--init-from-hf DIR."
        )
    config = load_run(args.config_argv)
    for line in check_published(config):
        print(f"plan: {line}", file=sys.stderr)
    if args.suggest:
        return print_suggestion(config, args)
    plan = make_plan(config, args.world_size, expert_imbalance=args.expert_imbalance)
    print(json.dumps(plan, indent=2) if args.json else _text(plan))
    return 0


def make_plan(
    config: TrainingConfig,
    world_size: int | None = None,
    *,
    expert_imbalance: float = DEFAULT_IMBALANCE,
) -> dict[str, Any]:
    """The plan as plain data.

    ``parameters`` counts the published model; ``padded`` what is stored when the vocabulary is
    padded for the configured tensor-parallel size. Operations and memory are None where they depend on
    something that is not given, which ``not_estimated`` says. Raises ``ConfigError``.
    """
    shape, padded = model_shape(config), padded_shape(config)
    count = count_parameters(shape)
    plan: dict[str, Any] = {
        "model": config.model.preset,
        "parameters": count.total,
        "active_parameters": count.active,
        "expert_parameters": count.experts,
        "active_expert_parameters": count.experts - count.inactive,
        "shared_expert_parameters": count.shared_experts,
        "mtp_parameters": count.mtp,
        "expert_bias_buffers": count.buffers,
        "mtp_expert_bias_buffers": count.mtp_buffers,
        "modules": _modules(count),
        "padded": {
            "vocab_size": padded.vocab_size,
            "parameters": count_parameters(padded).total,
        },
        "shape": dataclasses.asdict(shape),
    }
    return plan | _costs(config, world_size, expert_imbalance)


def _costs(config: TrainingConfig, world_size: int | None, expert_imbalance: float) -> dict[str, Any]:
    plan: dict[str, Any] = dict.fromkeys(
        ("world_size", "flops_per_token", "executed_flops_per_token", "flops_per_step")
    )
    plan |= dict.fromkeys(("expert_state_per_stage_bytes", "layers_per_chunk", "expert_data_parallel_size"))
    plan |= {"memory_per_rank_bytes": None, "memory_per_stage_bytes": None, "not_estimated": []}
    world = plan["world_size"] = config.fewest_processes if world_size is None else world_size
    if config.train.seq_length is None:
        plan["not_estimated"].append("operations and memory: they depend on --seq-length")
        return plan
    problems = [
        *model_problems(config),
        *parallel_problems(config, world),
        *expert_problems(config, world),
        *fp8_layer_problems(config),
    ]
    if problems:
        raise ConfigError("the layout is impossible:\n" + "\n".join(f"- {line}" for line in problems))
    case = memory_case(config, world, expert_imbalance=expert_imbalance)
    return plan | _operations(config, case, world) | _memory(config, case)


def _operations(config: TrainingConfig, case: MemoryCase, world: int) -> dict[str, Any]:
    flops = forward_flops(case.shape, case.activations.sequence)
    tokens = config.global_batch_size(world) * case.activations.sequence
    stages = range(case.pipeline_parallel)
    chunks = [place.kinds(case.shape) for stage in stages for place in places(case, stage)]
    return {
        "flops_per_token": flops.training,
        "executed_flops_per_token": executed_flops(flops, case.activations.recompute, chunks),
        "tokens_per_step": tokens,
        "flops_per_step": flops.training * tokens,
        "fp8": fp8_cost(config),
    }


def _memory(config: TrainingConfig, case: MemoryCase) -> dict[str, Any]:
    estimate = estimate_memory(case)
    notes = []
    if config.train.global_batch_size is None and case.pipeline_parallel > 1:
        notes.append(
            "activations of a full pipeline: --global-batch-size is not given, so that a step has one "
            "micro-batch"
        )
    found: dict[str, Any] = {
        "layers_per_chunk": list(chunk_layers(case)),
        "memory_per_rank_bytes": estimate.worst.as_dict(),
        "memory_per_stage_bytes": [stage.as_dict() for stage in estimate.stages],
        "not_estimated": notes,
    }
    if case.expert_parallel > 1:
        ranks = case.data_parallel * case.activations.context_parallel // case.expert_parallel
        stages = range(case.pipeline_parallel)
        found["expert_data_parallel_size"] = ranks
        found["expert_imbalance_assumed"] = case.activations.expert_imbalance
        found["expert_state_per_stage_bytes"] = [
            dataclasses.asdict(state_memory(case, stage, experts=True)) for stage in stages
        ]
    return found


def _modules(count: ParameterCount) -> dict[str, int]:
    return {
        "embedding": count.embedding,
        "attention": count.attention,
        "mlp": count.mlp,
        "router": count.router,
        "norms": count.norms,
        "head": count.head,
    }


def _text(plan: dict[str, Any]) -> str:
    lines = [f"{plan['model'] or 'model'}: {_shape_text(plan['shape'])}", ""]
    total = plan["parameters"]
    for name, value in plan["modules"].items():
        if value:
            lines.append(f"  {name:<11}{value:>20,}  {value / total:6.1%}")
            if name == "mlp" and plan["expert_parameters"]:
                lines += _expert_lines(plan)
    lines.append(f"  {'parameters':<11}{total:>20,}")
    if plan["active_parameters"] != total:
        lines.append(f"  {'active':<11}{plan['active_parameters']:>20,}  per token")
    if plan["mtp_parameters"]:
        lines.append(f"  {'mtp':<11}{plan['mtp_parameters']:>20,}  multi-token prediction, beside them")
    if plan["expert_bias_buffers"]:
        lines.append(f"  {'biases':<11}{plan['expert_bias_buffers']:>20,}  of experts, no parameters")
    if plan["padded"]["parameters"] != total:
        padded = plan["padded"]
        lines.append(
            f"  {'stored':<11}{padded['parameters']:>20,}  vocabulary padded to {padded['vocab_size']}"
        )
    return "\n".join([*lines, *_cost_lines(plan)])


def _shape_text(shape: dict[str, Any]) -> str:
    parts = [f"{shape['num_layers']} layers", f"hidden {shape['hidden_size']}"]
    parts += [f"ffn {shape['ffn_hidden_size']}", f"{shape['num_attention_heads']} heads"]
    if shape["multi_latent_attention"]:
        parts.append(f"latent attention {shape['q_lora_rank'] or 'no'} q, {shape['kv_lora_rank']} kv")
    else:
        parts.append(f"{shape['num_query_groups']} query groups")
    if shape["num_moe_experts"]:
        width = shape["moe_ffn_hidden_size"] or shape["ffn_hidden_size"]
        parts.append(f"{shape['num_moe_experts']} experts of {width}, {shape['moe_router_topk']} used")
    return ", ".join([*parts, f"vocabulary {shape['vocab_size']}"])


def _expert_lines(plan: dict[str, Any]) -> list[str]:
    lines = [f"    {'experts':<9}{plan['expert_parameters']:>20,}"]
    if plan["shared_expert_parameters"]:
        lines.append(f"    {'shared':<9}{plan['shared_expert_parameters']:>20,}")
    return lines


def _cost_lines(plan: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if plan["flops_per_token"] is not None:
        lines += [
            "",
            f"  {plan['flops_per_token']:.4g} floating-point operations per token, "
            f"{plan['flops_per_step']:.4g} per step of {plan['tokens_per_step']:,} tokens",
        ]
        if plan["executed_flops_per_token"] != plan["flops_per_token"]:
            executed = plan["executed_flops_per_token"]
            lines.append(f"  {executed:.4g} per token with what is recomputed or padded")
        if plan["fp8"] is not None:
            fp8 = plan["fp8"]
            lines += [
                f"  {fp8['flops_per_token']:.4g} per token in FP8 ({fp8['recipe']}), "
                f"{fp8['share_of_linears']:.1%} of the linears'; they keep their inputs in "
                f"{fp8['saved_inputs']}, and the memory below counts them in params dtype",
            ]
    memory = plan["memory_per_rank_bytes"]
    if memory is not None:
        stages = len(plan["memory_per_stage_bytes"])
        where = f", pipeline stage {memory['pipeline_stage']} of {stages}" if stages > 1 else ""
        lines += ["", f"  memory of a rank ({plan['world_size']} in all; the largest{where}):"]
        lines += [f"  {name:<14}{memory[name] / _GIB:>17,.3f} GiB" for name in PARTS if memory[name]]
        lines.append(f"  {'total':<14}{memory['total'] / _GIB:>17,.3f} GiB")
        lines += _layout_lines(plan, memory["pipeline_stage"])
    return lines + [f"  not estimated: {reason}" for reason in plan["not_estimated"]]


def _layout_lines(plan: dict[str, Any], stage: int) -> list[str]:
    """How experts and layers are spread, where that is not plain."""
    lines = []
    states, counts = plan["expert_state_per_stage_bytes"], plan["layers_per_chunk"]
    if states is not None:
        state = sum(states[stage].values()) / _GIB
        lines.append(
            f"  of it {state:,.3f} GiB weights, gradients and optimizer state of experts, whose "
            f"data-parallel size is {plan['expert_data_parallel_size']}; the busiest rank's experts are "
            f"assumed to receive {plan['expert_imbalance_assumed']:g} times the mean (--expert-imbalance)"
        )
    if len(set(counts)) > 1:
        lines.append(f"  layers of each model chunk: {','.join(map(str, counts))}")
    return lines
