"""Layers of each pipeline stage and chunk that a configuration asks for, ``balanced`` as numbers."""

from __future__ import annotations

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.parallel.stage_layers import Layout, divide_layers, end_counts
from mt_megatron.planning.balance import balanced_layout
from mt_megatron.planning.shape import padded_shape_of

BALANCED = "balanced"
"""Value of ``pipeline_model_parallel_layout`` that asks for ``balanced_layout``."""


def resolved_layout(config: TrainingConfig) -> Layout | None:
    """``pipeline_model_parallel_layout`` as Megatron-Core takes it: numbers in the place of ``balanced``.

    Raises ``ConfigError`` when ``balanced`` meets a model that is not complete or has too few layers.
    """
    layout: Layout | None = config.model.pipeline_model_parallel_layout
    if not isinstance(layout, str) or layout.strip() != BALANCED:
        return layout
    return balanced_layout(
        padded_shape_of(config),
        config.parallel.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size or 1,
        sequence=config.train.seq_length or 4096,
    )


def chunk_layer_counts(config: TrainingConfig) -> tuple[int, ...]:
    """Layers of each model chunk in the order that a batch takes. Raises ``ConfigError`` for an uneven
    division that nothing in the configuration settles."""
    first, last = end_counts(config.model)
    divided = divide_layers(
        config.model.num_layers,
        stages=config.parallel.pipeline_model_parallel_size,
        chunks=config.virtual_pipeline_model_parallel_size or 1,
        layout=resolved_layout(config),
        first=first,
        last=last,
        mtp_num_layers=config.model.mtp_num_layers or 0,
    )
    return tuple(map(len, divided))
