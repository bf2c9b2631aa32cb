"""Checks of experts, of how they divide over processes, and of the fields that are added to upstream's."""

from __future__ import annotations

import re

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.config.types import options
from mt_megatron.fp8.checks import fp8_problems
from mt_megatron.layers.transformer_checks import field_problems

_INSTRUCTION = re.compile(r"\. (?=(?:Change|Set|Leave|Raise|Lower) )")


def expert_problems(config: TrainingConfig, world_size: int) -> list[str]:
    """One line per problem: found, expected, what to change."""
    return [*_fields(config), *_experts(config), *_capacity(config), *_processes(config, world_size)]


def _fields(config: TrainingConfig) -> list[str]:
    parallel = config.parallel
    values = {
        **config.model.core.values,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "fp16": config.train.fp16,
    }
    return [_with_flags(problem) for problem in (*field_problems(values), *fp8_problems(values))]


def _with_flags(problem: str) -> str:
    """Fields that are to be changed, as one types them."""
    head, *tail = _INSTRUCTION.split(problem, maxsplit=1)
    if not tail:
        return problem
    known = options()
    words = re.sub(
        r"(?<![-\w])\w+", lambda word: known[word[0]].flag if word[0] in known else word[0], tail[0]
    )
    return f"{head}. {words}"


def _experts(config: TrainingConfig) -> list[str]:
    model, found = config.model, []
    experts = model.num_moe_experts
    if experts is None:
        return []
    if experts < 1:
        found.append(f"num_moe_experts is {experts}; expected at least 1. Set --num-moe-experts.")
    if not 1 <= model.moe_router_topk <= max(experts, 1):
        found.append(
            f"moe_router_topk is {model.moe_router_topk}; expected 1 to num_moe_experts = {experts}. "
            "Set --moe-router-topk."
        )
    if model.moe_extended_tp and model.moe_token_dispatcher_type != "allgather":
        found.append(
            f"moe_extended_tp is on with the {model.moe_token_dispatcher_type} dispatcher; expected "
            "allgather. Set --moe-token-dispatcher-type allgather."
        )
    if model.moe_extended_tp:
        found.extend(_extended_in_checkpoints(config))
    if model.add_bias_linear:
        found.append(
            f"add_bias_linear is on with num_moe_experts {experts}; expected no biases: experts have none. "
            "Set --disable-bias-linear."
        )
    return found


def _extended_in_checkpoints(config: TrainingConfig) -> list[str]:
    """Checkpoints that such a run names: Megatron-Core 0.9.0 raises an error where it would write or read
    experts that are cut that way, so the work up to the first save would be lost."""
    options = config.checkpoint
    named = {
        "save": options.save,
        "load": options.load,
        "resume": None if options.resume in ("auto", "never") else options.resume,
    }
    return [
        f"moe_extended_tp is on and {name} is {value}; expected no checkpoints: Megatron-Core 0.9.0 can "
        f"neither write nor read experts that are cut that way. Leave --moe-extended-tp or --{name} out."
        for name, value in named.items()
        if value is not None
    ]


def _capacity(config: TrainingConfig) -> list[str]:
    model, found = config.model, []
    if model.num_moe_experts is None:
        return []
    if model.moe_expert_capacity_factor is not None:
        if model.moe_token_dispatcher_type == "allgather":
            found.append(
                "moe_expert_capacity_factor is set with the allgather dispatcher; expected alltoall or "
                "alltoall_seq. Set --moe-token-dispatcher-type alltoall."
            )
        if model.moe_router_load_balancing_type == "sinkhorn":
            found.append(
                "moe_expert_capacity_factor is set with sinkhorn balancing; expected aux_loss, seq_aux_loss "
                "or none. Set --moe-router-load-balancing-type."
            )
    elif model.moe_pad_expert_input_to_capacity:
        found.append(
            "moe_pad_expert_input_to_capacity is on without a capacity; expected "
            "moe_expert_capacity_factor. Set --moe-expert-capacity-factor."
        )
    return found


def _processes(config: TrainingConfig, world_size: int) -> list[str]:
    parallel, found = config.parallel, []
    size, experts = parallel.expert_model_parallel_size, config.model.num_moe_experts
    if experts is None:
        if size == 1:
            return []
        return [
            (
                f"expert_model_parallel_size is {size} for a model without experts; expected 1. Leave "
                "--expert-model-parallel-size out."
            )
        ]
    share = config.fewest_processes
    if size > 1 and share >= 1 and world_size % share:
        found.append(
            f"world size is {world_size}; expected a multiple of tensor x pipeline x context x expert "
            f"parallel size = {share}. Start another number of processes or change those sizes."
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        found.append(
            "experts and tensor parallelism are combined without sequence_parallel; expected it. Set "
            "--sequence-parallel."
        )
    if size > 1 and config.train.fp16:
        found.append(
            "expert_model_parallel_size is above 1 with fp16; expected bf16 or fp32: the optimizers of "
            "experts and of all else would scale the loss each by itself. Set --bf16 --no-fp16."
        )
    return found
