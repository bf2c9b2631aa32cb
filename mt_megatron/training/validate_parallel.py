"""Checks of how model and batch divide over processes."""

from __future__ import annotations

import math

from mt_megatron.errors import ConfigError
from mt_megatron.training.config import TrainingConfig
from mt_megatron.training.validate_nodes import node_problems

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def parallel_problems(config: TrainingConfig, world_size: int) -> list[str]:
    """One line per problem: found, expected, what to change."""
    parallel, found = config.parallel, []
    for name in _SIZES:
        if getattr(parallel, name) < 1:
            found.append(
                f"{name} is {getattr(parallel, name)}; expected at least 1. Set --{name.replace('_', '-')}."
            )
    if found:
        return found
    return [
        *_tensor(config),
        *node_problems(config, world_size),
        *_context(config),
        *_packed(config),
        *_pipeline(config),
        *_data(config, world_size),
        *_expert(config, world_size),
    ]


def _tensor(config: TrainingConfig) -> list[str]:
    model, found = config.model, []
    size = config.parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        value = getattr(model, name)
        if value is not None and value % size:
            found.append(
                f"{name} is {value}; expected a multiple of tensor_model_parallel_size = {size}. "
                f"Change --{name.replace('_', '-')} or --tensor-model-parallel-size."
            )
    length = config.train.seq_length
    if config.parallel.sequence_parallel:
        if size == 1:
            found.append(
                "sequence_parallel is on with tensor_model_parallel_size 1; expected a size above 1, whose "
                "processes it splits the sequence over. Leave --sequence-parallel out or raise "
                "--tensor-model-parallel-size."
            )
        # With context parallelism _context asks for more than this.
        if length is not None and length % size and config.parallel.context_parallel_size == 1:
            found.append(
                f"seq_length is {length}; expected a multiple of tensor_model_parallel_size = {size} with "
                "sequence_parallel. Change --seq-length."
            )
    return found


def _context(config: TrainingConfig) -> list[str]:
    parallel, length = config.parallel, config.train.seq_length
    size, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if size == 1:
        if parallel.cp_comm_type is None:
            return []
        return [
            (
                f"cp_comm_type is {parallel.cp_comm_type} with context_parallel_size 1; expected a size "
                "above 1, whose processes exchange keys and values. Leave --cp-comm-type out or raise "
                "--context-parallel-size."
            )
        ]
    # Each process holds two chunks, which sequence parallelism divides again.
    divisor = math.lcm(2 * size, size * tensor) if parallel.sequence_parallel else 2 * size
    if length is None or length % divisor == 0:
        return []
    why = f"2 x context_parallel_size = {2 * size}"
    if parallel.sequence_parallel:
        why += f" and of context x tensor parallel size = {size * tensor} with sequence_parallel"
    return [f"seq_length is {length}; expected a multiple of {why}. Change --seq-length."]


def _packed(config: TrainingConfig) -> list[str]:
    if not config.data.packed_sequences:
        return []
    size = config.parallel.context_parallel_size
    if not config.data.reset_attention_mask:
        return [
            "packed_sequences is on without reset_attention_mask; expected both: it is how attention that "
            "stops at document borders is computed. Set --reset-attention-mask or leave "
            "--packed-sequences out."
        ]
    if size > 1:
        return [
            f"packed_sequences is on with context_parallel_size {size}; expected 1: a process holds chunks "
            "of the sequence, not documents. Leave --packed-sequences out, which then uses a mask, or "
            "lower --context-parallel-size."
        ]
    return []


def _pipeline(config: TrainingConfig) -> list[str]:
    parallel, model, found = config.parallel, config.model, []
    stages, layers = parallel.pipeline_model_parallel_size, model.num_layers
    chunks, per_chunk = (
        parallel.virtual_pipeline_model_parallel_size,
        parallel.num_layers_per_virtual_pipeline_stage,
    )
    for name, value in (
        ("virtual_pipeline_model_parallel_size", chunks),
        ("num_layers_per_virtual_pipeline_stage", per_chunk),
    ):
        if value is not None and value < 1:
            return [f"{name} is {value}; expected at least 1. Set --{name.replace('_', '-')}."]
    interleaved = _interleaved(config)
    if interleaved and stages == 1:
        found.append(
            "interleaving is asked for with pipeline_model_parallel_size 1; expected a size above 1. Leave "
            "--virtual-pipeline-model-parallel-size out or raise --pipeline-model-parallel-size."
        )
    first, last = model.first_pipeline_num_layers, model.last_pipeline_num_layers
    if first is not None or last is not None:
        if interleaved:
            found.append(
                "first_pipeline_num_layers or last_pipeline_num_layers is set together with interleaving; "
                "expected one of the two: upstream cannot combine them. Leave "
                "--virtual-pipeline-model-parallel-size out."
            )
        return found + _uneven(layers, stages, first, last)
    if layers % stages:
        # Upstream divides, rounds down and leaves the remaining layers out without a word.
        found.append(
            f"num_layers is {layers}; expected a multiple of pipeline_model_parallel_size = {stages}. Change "
            "--num-layers or --pipeline-model-parallel-size, or set --first-pipeline-num-layers and "
            "--last-pipeline-num-layers."
        )
        return found
    per_stage = layers // stages
    if per_chunk is not None and per_stage % per_chunk:
        found.append(
            f"num_layers_per_virtual_pipeline_stage is {per_chunk}; expected a divisor of the {per_stage} "
            "layers per stage. Change --num-layers-per-virtual-pipeline-stage."
        )
    if chunks is not None and per_stage % chunks:
        found.append(
            f"num_layers is {layers}; expected a multiple of pipeline stages x chunks per stage = {stages} x "
            f"{chunks}. Change --num-layers or --virtual-pipeline-model-parallel-size."
        )
    if chunks is not None and per_chunk is not None and chunks * per_chunk != per_stage:
        found.append(
            f"virtual_pipeline_model_parallel_size {chunks} x num_layers_per_virtual_pipeline_stage "
            f"{per_chunk} is not the {per_stage} layers per stage; expected them to agree. Leave "
            "--num-layers-per-virtual-pipeline-stage out."
        )
    if model.defer_embedding_wgrad_compute and (stages == 1 or not model.gradient_accumulation_fusion):
        found.append(
            "defer_embedding_wgrad_compute is on; expected pipeline_model_parallel_size above 1 and "
            "gradient_accumulation_fusion with it. Set --gradient-accumulation-fusion or leave "
            "--defer-embedding-wgrad-compute out."
        )
    if model.wgrad_deferral_limit < 0:
        found.append(
            f"wgrad_deferral_limit is {model.wgrad_deferral_limit}; expected at least 0, where 0 is all "
            "micro-batches. Set --wgrad-deferral-limit."
        )
    if interleaved and stages == 2 and not model.overlap_p2p_comm:
        found.append(
            "overlap_p2p_comm is off with 2 interleaved stages; expected on: without it, batches of sends "
            "between the same two processes would mix. Leave --no-overlap-p2p-comm out."
        )
    return found


def _interleaved(config: TrainingConfig) -> bool:
    # Not by the number of chunks alone: one that does not come out even is asked for all the same.
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    return (chunks or 1) > 1 or config.virtual_pipeline_model_parallel_size is not None


def _uneven(layers: int, stages: int, first: int | None, last: int | None) -> list[str]:
    given = [value for value in (first, last) if value is not None]
    rest, others = layers - sum(given), stages - len(given)
    fits = min(given) >= 1 and others >= 0 and rest >= 0 and stages > 1
    if fits and (rest % others == 0 and rest >= others if others else rest == 0):
        return []
    return [
        (
            f"first_pipeline_num_layers {first} and last_pipeline_num_layers {last} leave {rest} of {layers} "
            f"layers to {others} other pipeline stages; expected an equal number, at least one, for each. "
            "Change these two or --pipeline-model-parallel-size."
        )
    ]


def _data(config: TrainingConfig, world_size: int) -> list[str]:
    parallel, train, found = config.parallel, config.train, []
    if parallel.overlap_param_gather and not (
        parallel.use_distributed_optimizer and parallel.overlap_grad_reduce
    ):
        found.append(
            "overlap_param_gather is on without use_distributed_optimizer and overlap_grad_reduce; expected "
            "both. Set --use-distributed-optimizer --overlap-grad-reduce."
        )
    if config.ddp.align_param_gather and not parallel.overlap_param_gather:
        found.append(
            "align_param_gather is on without overlap_param_gather; expected both. Set "
            "--overlap-param-gather or leave --align-param-gather out."
        )
    bucket = config.ddp.bucket_size
    if bucket is not None and bucket < 1:
        found.append(f"bucket_size is {bucket}; expected at least 1. Set --bucket-size.")
    try:
        config.data_parallel_size(world_size)
    except ConfigError as error:
        return [*found, str(error)]
    if train.micro_batch_size < 1 or (train.global_batch_size is not None and train.global_batch_size < 1):
        return found  # train_problems names them.
    try:
        microbatches = config.num_microbatches(world_size)
    except ConfigError as error:
        return [*found, str(error)]
    stages = parallel.pipeline_model_parallel_size
    if _interleaved(config) and microbatches % stages:
        found.append(
            f"there are {microbatches} micro-batches per step; expected a multiple of "
            f"pipeline_model_parallel_size = {stages} under the interleaved schedule. Change "
            "--global-batch-size or --micro-batch-size."
        )
    return found


def _expert(config: TrainingConfig, world_size: int) -> list[str]:
    parallel, found = config.parallel, []
    size, experts = parallel.expert_model_parallel_size, config.model.num_moe_experts
    if size == 1:
        return []
    if experts is None:
        return [
            (
                f"expert_model_parallel_size is {size} for a model without experts; expected 1. Leave "
                "--expert-model-parallel-size out."
            )
        ]
    if experts % size:
        found.append(
            f"num_moe_experts is {experts}; expected a multiple of expert_model_parallel_size = {size}. "
            "Change --num-moe-experts or --expert-model-parallel-size."
        )
    share = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if world_size % (share * size):
        found.append(
            f"world size is {world_size}; expected a multiple of tensor x pipeline x expert parallel size = "
            f"{share * size}. Start another number of processes or change those sizes."
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        found.append(
            "expert and tensor parallelism are combined without sequence_parallel; expected it. Set "
            "--sequence-parallel."
        )
    if config.train.fp16:
        found.append(
            "expert_model_parallel_size is above 1 with fp16; expected bf16 or fp32. Set --bf16 --no-fp16."
        )
    return found
