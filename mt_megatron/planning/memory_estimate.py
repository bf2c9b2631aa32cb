"""The memory that a configuration will need on each rank, computed without torch and without a device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Schedule
from mt_megatron.pipeline.choice import AUTO
from mt_megatron.planning.activation_memory import ActivationOptions, Recompute
from mt_megatron.planning.fp8_report import casts_of
from mt_megatron.planning.memory import MemoryCase, MemoryEstimate, estimate_memory
from mt_megatron.planning.parameter_memory import StateOptions
from mt_megatron.planning.parameters import ModelShape
from mt_megatron.planning.pipeline_layout import chunk_layer_counts
from mt_megatron.planning.shape import padded_shape_of

DEFAULT_IMBALANCE = 1.2
"""Tokens that the busiest expert-parallel rank receives over their mean, unless somebody knows better: an
assumption, which only dropless experts and expert parallelism depend on."""


def memory_of(
    config: TrainingConfig,
    world_size: int,
    *,
    on_cpu: bool = False,
    expert_imbalance: float = DEFAULT_IMBALANCE,
) -> MemoryEstimate:
    """Bytes per rank for each pipeline stage of a run of ``world_size`` processes.

    ``config`` must have passed ``validate``'s checks of model and layout. ``on_cpu`` says that dropout
    masks are as wide as activations and that the loss works in small blocks. Raises ``ConfigError`` for
    what is not described completely.
    """
    return estimate_memory(memory_case(config, world_size, on_cpu=on_cpu, expert_imbalance=expert_imbalance))


def memory_case(
    config: TrainingConfig,
    world_size: int,
    *,
    on_cpu: bool = False,
    expert_imbalance: float = DEFAULT_IMBALANCE,
) -> MemoryCase:
    """``config`` in the terms of ``mt_megatron.planning.memory``. Raises as ``memory_of`` does."""
    if config.train.seq_length is None:
        raise ConfigError("seq_length is not set; memory depends on it. Set --seq-length.")
    if not 1 <= expert_imbalance < math.inf:
        raise ConfigError(
            f"--expert-imbalance is {expert_imbalance}; expected at least 1: the tokens of the busiest "
            "expert-parallel rank over their mean"
        )
    parallel, model = config.parallel, config.model
    activations = _activations(config, config.train.seq_length, on_cpu)
    return MemoryCase(
        shape=padded_shape(config),
        state=_state(config),
        activations=dataclasses.replace(activations, expert_imbalance=expert_imbalance),
        num_microbatches=config.num_microbatches(world_size),
        data_parallel=config.data_parallel_size(world_size),
        expert_parallel=parallel.expert_model_parallel_size,
        pipeline_parallel=parallel.pipeline_model_parallel_size,
        chunks=config.virtual_pipeline_model_parallel_size or 1,
        layers=chunk_layer_counts(config),
        fused_weight_gradients=model.gradient_accumulation_fusion,
        schedule=_schedule(config, world_size),
        casts=casts_of(config, on_cpu=on_cpu),
    )


def _schedule(config: TrainingConfig, world_size: int) -> Schedule | None:
    """None for Megatron-Core's own, and for ``auto``, which has not chosen yet."""
    choice, parallel = config.schedule_choice, config.parallel
    if choice is None or choice.name == AUTO:
        return None
    chunks = config.virtual_pipeline_model_parallel_size or 1
    stages = parallel.pipeline_model_parallel_size
    return choice.schedule(stages, chunks, config.num_microbatches(world_size))


def padded_shape(config: TrainingConfig) -> ModelShape:
    """The model's shape with the vocabulary padded as it is stored."""
    return padded_shape_of(config)


def element_bytes(config: TrainingConfig) -> int:
    """Bytes of a parameter or an activation."""
    return 2 if config.train.bf16 or config.train.fp16 else 4


def _state(config: TrainingConfig) -> StateOptions:
    width = element_bytes(config)
    return StateOptions(
        parameter_bytes=width,
        gradient_bytes=4 if config.ddp.grad_reduce_in_fp32 else width,
        adam=config.optimizer.optimizer == "adam",
        momentum=bool(config.optimizer.sgd_momentum),
        distributed=config.parallel.use_distributed_optimizer,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        bucket_size=config.ddp.bucket_size,
    )


def _activations(config: TrainingConfig, sequence: int, on_cpu: bool) -> ActivationOptions:
    parallel, model, width = config.parallel, config.model, element_bytes(config)
    return ActivationOptions(
        sequence=sequence,
        micro_batch=config.train.micro_batch_size,
        element_bytes=width,
        tensor_parallel=parallel.tensor_model_parallel_size,
        context_parallel=parallel.context_parallel_size,
        exchange=parallel.cp_comm_type or "all_gather",
        sequence_parallel=parallel.sequence_parallel,
        recompute=recompute_of(model),
        fused_activation=model.bias_activation_fusion,
        hidden_dropout=model.hidden_dropout > 0,
        window=_has_window(model.window_size, sequence),
        documents_mask=model.masked_words
        or config.data.reset_attention_mask
        and (config.data.packed_sequences is False or parallel.context_parallel_size > 1),
        attention_dropout=model.attention_dropout > 0,
        fused_loss=model.cross_entropy_loss_fusion and not model.masked_words,
        on_cpu=on_cpu,
        rotary_share=model.rotary_percent if model.position_embedding_type == "rope" else 0.0,
        deallocate_outputs=model.deallocate_pipeline_outputs,
        expert_parallel=parallel.expert_model_parallel_size,
        expert_dispatcher=model.moe_token_dispatcher_type,
        expert_capacity_factor=model.moe_expert_capacity_factor,
        pad_to_capacity=model.moe_pad_expert_input_to_capacity,
        router_bytes={"fp32": 4, "fp64": 8}.get(model.moe_router_dtype or ""),
        aux_loss=model.moe_aux_loss_coeff > 0
        and model.moe_router_load_balancing_type in ("aux_loss", "seq_aux_loss"),
    )


def _has_window(size: tuple[int, int] | None, sequence: int) -> bool:
    """True where a window hides more than causality does: a side below 0 or as long as the sequence
    hides nothing."""
    return size is not None and 0 <= size[0] < sequence - 1


def recompute_of(model: Any) -> Recompute:
    """The recomputation that the configuration's ``model`` section asks for."""
    return Recompute(
        granularity=model.recompute_granularity,
        method=model.recompute_method,
        num_layers=model.recompute_num_layers or 1,
        distribute=bool(model.distribute_saved_activations),
        mla_up_proj=bool(model.recompute_mla_up_proj),
        moe_layer=bool(model.moe_layer_recompute),
    )
