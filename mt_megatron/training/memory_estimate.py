"""The memory that a configuration will need on each rank, computed without torch and without a device."""

from __future__ import annotations

import dataclasses
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.models.activation_memory import ActivationOptions, Recompute
from mt_megatron.models.memory import MemoryCase, MemoryEstimate, estimate_memory
from mt_megatron.models.parameter_memory import StateOptions
from mt_megatron.models.parameters import ModelShape, padded_vocab_size
from mt_megatron.training.config import TrainingConfig
from mt_megatron.training.config_build import model_shape


def memory_of(config: TrainingConfig, world_size: int, *, on_cpu: bool = False) -> MemoryEstimate:
    """Bytes per rank for each pipeline stage of a run of ``world_size`` processes.

    ``config`` must have passed ``validate``'s checks of model and layout. ``on_cpu`` says that dropout
    masks are as wide as activations and that the loss works in small blocks. Raises ``ConfigError`` for
    what is not described completely, and for mixtures of experts, whose activations are not modelled.
    """
    return estimate_memory(memory_case(config, world_size, on_cpu=on_cpu))


def memory_case(config: TrainingConfig, world_size: int, *, on_cpu: bool = False) -> MemoryCase:
    """``config`` in the terms of ``mt_megatron.models.memory``. Raises as ``memory_of`` does."""
    if config.model.num_moe_experts is not None:
        raise ConfigError(
            f"num_moe_experts is {config.model.num_moe_experts}; expected a dense model: the activations of "
            "experts depend on how tokens are routed, and this version has no estimate of them"
        )
    if config.train.seq_length is None:
        raise ConfigError("seq_length is not set; memory depends on it. Set --seq-length.")
    parallel, model = config.parallel, config.model
    return MemoryCase(
        shape=padded_shape(config),
        state=_state(config),
        activations=_activations(config, config.train.seq_length, on_cpu),
        num_microbatches=config.num_microbatches(world_size),
        data_parallel=config.data_parallel_size(world_size),
        expert_parallel=parallel.expert_model_parallel_size,
        pipeline_parallel=parallel.pipeline_model_parallel_size,
        chunks=config.virtual_pipeline_model_parallel_size or 1,
        first_stage_layers=model.first_pipeline_num_layers,
        last_stage_layers=model.last_pipeline_num_layers,
        fused_weight_gradients=model.gradient_accumulation_fusion,
    )


def padded_shape(config: TrainingConfig) -> ModelShape:
    """The model's shape with the vocabulary padded as it is stored."""
    shape = model_shape(config)
    padded = padded_vocab_size(
        shape.vocab_size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel=config.parallel.tensor_model_parallel_size,
    )
    return dataclasses.replace(shape, vocab_size=padded)


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
        sequence_parallel=parallel.sequence_parallel,
        recompute=recompute_of(model),
        fused_activation=model.bias_activation_fusion,
        hidden_dropout=model.hidden_dropout > 0,
        fused_loss=model.cross_entropy_loss_fusion,
        on_cpu=on_cpu,
        rotary_share=model.rotary_percent if model.position_embedding_type == "rope" else 0.0,
        deallocate_outputs=model.deallocate_pipeline_outputs,
    )


def recompute_of(model: Any) -> Recompute:
    """The recomputation that the configuration's ``model`` section asks for."""
    return Recompute(
        granularity=model.recompute_granularity,
        method=model.recompute_method,
        num_layers=model.recompute_num_layers or 1,
        distribute=bool(model.distribute_saved_activations),
    )
