"""``mt-megatron plan``: parameters, operations and memory of a run, and layouts that fit a machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from mt_megatron.cli.plan_suggest import add_options, print_suggestion
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.flops import executed_flops, forward_flops
from mt_megatron.planning.memory import PARTS, MemoryCase, chunk_layers, estimate_memory, places, state_memory
from mt_megatron.planning.memory_estimate import DEFAULT_IMBALANCE, memory_case, padded_shape
from mt_megatron.planning.parameters import ParameterCount, count_parameters
from mt_megatron.planning.validate.model import model_problems
from mt_megatron.planning.validate.parallel import parallel_problems

_GIB = 2**30


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        description="Count a model's parameters exactly, per kind of module, and what a step of training\n"
        "takes: floating-point operations and the memory of each rank. Nothing is built.\n"
        "Takes --model NAME and every other option of mt-megatron pretrain.",
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
        raise ConfigError("no model is given. Name a preset, such as --model llama3_8b.")
    config = load_config(args.config_argv)
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
    parallel = config.parallel
    share = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
        * parallel.expert_model_parallel_size
    )
    world = plan["world_size"] = share if world_size is None else world_size
    if config.train.seq_length is None:
        plan["not_estimated"].append("operations and memory: they depend on --seq-length")
        return plan
    problems = [*model_problems(config), *parallel_problems(config, world)]
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
