"""Checks of how model and batch divide over processes."""

from __future__ import annotations

import math

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.validate.nodes import node_problems
from mt_megatron.planning.validate.pipeline import is_interleaved, pipeline_problems

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
        *pipeline_problems(config),
        *_data(config, world_size),
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
    if is_interleaved(config) and microbatches % stages:
        found.append(
            f"there are {microbatches} micro-batches per step; expected a multiple of "
            f"pipeline_model_parallel_size = {stages} under the interleaved schedule. Change "
            "--global-batch-size or --micro-batch-size."
        )
    return found
