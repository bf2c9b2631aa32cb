"""Tensors that share a file of a distributed checkpoint: those that one pipeline stage's expert-parallel
rank reads, up to a size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.convert.tensors.state_names import weight_name
from mt_megatron.parallel.stage_layers import end_counts, stage_layers
from mt_megatron.planning.pipeline_layout import resolved_layout

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def virtual_stages(config: TrainingConfig) -> list[list[int]]:
    """The layers of every virtual stage (chunk x stages + stage). Raises ``ConfigError`` when they do not
    come out as the configuration says."""
    first, last = end_counts(config.model)
    return stage_layers(
        SimpleNamespace(
            num_layers=config.model.num_layers,
            pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            pipeline_model_parallel_layout=resolved_layout(config),
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            mtp_num_layers=config.model.mtp_num_layers,
        )
    )


def virtual_stage_of(name: str, stages: list[list[int]]) -> int:
    """The virtual stage that holds the tensor ``name``."""
    name = weight_name(name)
    layer = _LAYER.match(name)
    if layer is not None:
        return next(index for index, layers in enumerate(stages) if int(layer[1]) in layers)
    return 0 if name.startswith("embedding.") else len(stages) - 1


def expert_of(name: str) -> int | None:
    """The expert that ``name`` is of; None for what is of none."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def groups(config: TrainingConfig, sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The names of ``sizes`` (name -> bytes), by file; a file has at most ``most`` bytes, or one tensor."""
    stages, pipeline = virtual_stages(config), config.parallel.pipeline_model_parallel_size
    experts = config.model.num_moe_experts or 1
    each = max(1, experts // config.parallel.expert_model_parallel_size)
    owned: dict[tuple[int, int], list[str]] = {}
    for name in sizes:
        stage = virtual_stage_of(name, stages) % pipeline
        owned.setdefault((stage, (expert_of(name) or 0) // each), []).append(name)
    found: list[list[str]] = []
    for names in owned.values():
        found.append([])
        used = 0
        for name in names:
            if found[-1] and used + sizes[name] > most:
                found.append([])
                used = 0
            found[-1].append(name)
            used += sizes[name]
    return found
