"""Checks of how layers divide over pipeline stages and their chunks."""

from __future__ import annotations

from mt_megatron.errors import ConfigError
from mt_megatron.parallel.stage_layers import divide_layers, end_counts
from mt_megatron.training.config import TrainingConfig

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
        if parallel.pipeline_model_parallel_size > 1:
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
    if is_interleaved(config) and stages == 2 and not model.overlap_p2p_comm:
        found.append(
            "overlap_p2p_comm is off with 2 interleaved stages; expected on: without it, batches of sends "
            "between the same two processes would mix. Leave --no-overlap-p2p-comm out."
        )
    return found
