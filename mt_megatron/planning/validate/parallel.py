"""Checks of how model and batch divide over processes, pipeline stages and nodes."""

from __future__ import annotations

import math
import os

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.parallel.stage_layers import divide_layers, end_counts
from mt_megatron.planning.balance import too_few_layers
from mt_megatron.planning.validate.schedule import runs_upstream, schedule_problems, transport_problems


def node_problems(
    config: TrainingConfig, world_size: int, processes_per_node: int | None = None
) -> list[str]:
    """One line if a tensor-parallel group would have ranks on several nodes; empty otherwise.

    Tensor-parallel neighbours have adjacent ranks and a node has ``processes_per_node`` adjacent ones
    (torchrun's ``LOCAL_WORLD_SIZE`` when None; unknown without it, and then nothing is said), so the
    size must divide it. ``allow_tensor_parallel_across_nodes`` accepts the other case.
    """
    size = config.parallel.tensor_model_parallel_size
    local = _local_world_size() if processes_per_node is None else processes_per_node
    if local is None or world_size <= local or size < 1 or local % size == 0:
        return []
    if config.parallel.allow_tensor_parallel_across_nodes:
        return []
    fits = [str(each) for each in range(1, local + 1) if local % each == 0]
    return [
        (
            f"tensor_model_parallel_size is {size} with {local} processes on each node; expected a divisor "
            f"of that ({', '.join(fits)}): every layer would wait for the links between nodes. Lower "
            "--tensor-model-parallel-size and raise --pipeline-model-parallel-size, start another number of "
            "processes per node, or set --allow-tensor-parallel-across-nodes to accept it."
        )
    ]


def _local_world_size() -> int | None:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None


BALANCED = "balanced"
"""The ``pipeline_model_parallel_layout`` that is computed from what layers cost."""


def pipeline_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    parallel = config.parallel
    for name in ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"):
        value = getattr(parallel, name)
        if value is not None and value < 1:
            return [f"{name} is {value}; expected at least 1. Set --{name.replace('_', '-')}."]
    found = []
    if is_interleaved(config) and parallel.pipeline_model_parallel_size == 1:
        found.append(
            "interleaving is asked for with pipeline_model_parallel_size 1; expected a size above 1. Leave "
            "--virtual-pipeline-model-parallel-size out or raise --pipeline-model-parallel-size."
        )
    if config.model.pipeline_model_parallel_layout is not None:
        found += _layout(config)
    else:
        try:
            ends = end_counts(config.model)
        except ConfigError:
            return found  # The checks of the fields name it.
        found += _uneven(config, *ends) if ends != (None, None) else _even(config)
    return found or _communication(config)


def is_interleaved(config: TrainingConfig) -> bool:
    """Whether more than one chunk per stage is asked for, also where they do not come out even."""
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    return (chunks or 1) > 1 or config.virtual_pipeline_model_parallel_size is not None


def _layout(config: TrainingConfig) -> list[str]:
    parallel, layout = config.parallel, config.model.pipeline_model_parallel_layout
    if layout == BALANCED:
        stages = parallel.pipeline_model_parallel_size
        problem = too_few_layers(
            config.model.num_layers, stages, config.virtual_pipeline_model_parallel_size or 1
        )
        if problem is not None:
            return [problem]
        if stages > 1:
            return []
        return [
            "pipeline_model_parallel_layout is balanced with pipeline_model_parallel_size 1; expected a size "
            "above 1. Leave --pipeline-model-parallel-layout out or raise --pipeline-model-parallel-size."
        ]
    for name in ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"):
        if getattr(parallel, name) is not None:
            return [
                f"{name} is {getattr(parallel, name)} beside pipeline_model_parallel_layout, which says how "
                f"many chunks there are; expected one of the two. Leave --{name.replace('_', '-')} out."
            ]
    try:
        divide_layers(
            config.model.num_layers,
            stages=parallel.pipeline_model_parallel_size,
            chunks=config.virtual_pipeline_model_parallel_size or 1,
            layout=layout,
            mtp_num_layers=config.model.mtp_num_layers or 0,
        )
    except ConfigError as error:
        return [f"{error}: --pipeline-model-parallel-layout."]
    return []


def _uneven(config: TrainingConfig, first: int | None, last: int | None) -> list[str]:
    layers, stages = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    given = [value for value in (first, last) if value is not None]
    rest, others = layers - sum(given), stages - len(given)
    fits = min(given) >= 1 and others >= 0 and rest >= 0 and stages > 1
    if not (fits and (rest % others == 0 and rest >= others if others else rest == 0)):
        return [
            (
                f"first_pipeline_num_layers {first} and last_pipeline_num_layers {last} leave {rest} of "
                f"{layers} layers to {others} other pipeline stages; expected an equal number, at least one, "
                "for each. Change these two or --pipeline-model-parallel-size."
            )
        ]
    chunks = config.virtual_pipeline_model_parallel_size or 1
    try:
        divide_layers(layers, stages=stages, chunks=chunks, first=first, last=last)
    except ConfigError as error:
        return [f"{error}: --virtual-pipeline-model-parallel-size."]
    return []


def _even(config: TrainingConfig) -> list[str]:
    parallel, layers, found = config.parallel, config.model.num_layers, []
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if layers % stages:
        # Upstream divides, rounds down and leaves the remaining layers out without a word.
        return [
            (
                f"num_layers is {layers}; expected a multiple of pipeline_model_parallel_size = {stages}. "
                "Change --num-layers or --pipeline-model-parallel-size, or say how they divide with "
                "--pipeline-model-parallel-layout (balanced, or the layers of every stage)."
            )
        ]
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
    return found


def _communication(config: TrainingConfig) -> list[str]:
    model, found = config.model, []
    stages = config.parallel.pipeline_model_parallel_size
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
    if model.overlap_p2p_comm and not is_interleaved(config) and stages > 1 and runs_upstream(config):
        found.append(
            "overlap_p2p_comm is on without interleaved stages; expected more than one chunk per stage with "
            "it. Leave --overlap-p2p-comm out, or set --no-overlap-p2p-comm or "
            "--virtual-pipeline-model-parallel-size."
        )
    if is_interleaved(config) and stages == 2 and not model.overlap_p2p_comm and runs_upstream(config):
        found.append(
            "overlap_p2p_comm is off with 2 interleaved stages; expected on: without it, batches of sends "
            "between the same two processes would mix. Leave --no-overlap-p2p-comm out or set "
            "--overlap-p2p-comm."
        )
    return found


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
    found += transport_problems(config)
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
    if is_interleaved(config) and microbatches % stages and runs_upstream(config):
        found.append(
            f"there are {microbatches} micro-batches per step; expected a multiple of "
            f"pipeline_model_parallel_size = {stages} under the interleaved schedule. Change "
            "--global-batch-size or --micro-batch-size, or take --pipeline-schedule depth_first."
        )
    return found or schedule_problems(config, microbatches)
