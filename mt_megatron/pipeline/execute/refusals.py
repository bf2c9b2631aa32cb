"""Conditions that a schedule cannot be run under, found before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_megatron.errors import ConfigError
from mt_megatron.parallel import stage_order
from mt_megatron.pipeline.actions import Schedule, Style
from mt_megatron.pipeline.execute.reduction import require_per_chunk

if TYPE_CHECKING:
    from mt_megatron.pipeline.execute.executor import StepCall


def require_fit(schedule: Schedule, call: StepCall, decoder_seq_length: int | None) -> None:
    """Raise ConfigError where ``schedule`` does not fit the process groups, the model or the step."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_config, get_model_type

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    style = Style.V if stage_order.is_v() else Style.LOOP
    placement = schedule.placement
    name = f"pipeline schedule {schedule.name}"
    if (placement.ranks, placement.chunks) != (ranks, chunks):
        raise ConfigError(
            f"found {name} for {placement.ranks} ranks of {placement.chunks} chunks; expected {ranks} ranks "
            f"of {chunks}, as the process groups are. Change the schedule or the parallel sizes"
        )
    if chunks > 1 and placement.style is not style:
        raise ConfigError(
            f"found {name} for stages in a {placement.style.value}, and a model whose stages are laid out in "
            f"a {style.value}; expected the same. Choose the schedule before the process groups are made"
        )
    if schedule.microbatches != call.num_microbatches or schedule.forward_only != call.forward_only:
        found, asked = (
            f"{count} micro-batches{' forward only' * only}"
            for count, only in (
                (schedule.microbatches, schedule.forward_only),
                (call.num_microbatches, call.forward_only),
            )
        )
        raise ConfigError(
            f"found {name} of {found} and a step of {asked}; expected the same. Give a schedule for this "
            "number, or change the batch size"
        )
    if not len(call.model) == len(call.batches) == chunks:
        raise ConfigError(
            f"found {len(call.model)} model chunks and {len(call.batches)} batch iterators; expected "
            f"{chunks} of each, one per virtual pipeline stage"
        )
    if get_model_type(call.model[0]) is ModelType.encoder_and_decoder:
        raise ConfigError(
            f"found {name} for a model of encoder and decoder; expected one of the two. Take Megatron-Core's "
            "own schedules (--pipeline-schedule 1f1b)"
        )
    if decoder_seq_length is not None and decoder_seq_length != call.seq_length:
        raise ConfigError(
            f"found {name} with decoder_seq_length {decoder_seq_length} and seq_length {call.seq_length}; "
            "expected the same. Take Megatron-Core's own schedules (--pipeline-schedule 1f1b)"
        )
    if not call.forward_only:
        require_per_chunk(get_model_config(call.model[0]), len(call.model))
    if get_model_config(call.model[0]).pipeline_dtype is None:
        raise ConfigError(
            "found no pipeline_dtype in the model's configuration; expected that of its outputs"
        )
