"""Checks of the pipeline schedule and of the transport between stages that are asked for."""

from __future__ import annotations

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError


def runs_upstream(config: TrainingConfig) -> bool:
    """True where Megatron-Core's own schedule runs; also where the choice cannot be read, which is a problem
    of its own."""
    try:
        return config.schedule_choice is None
    except ConfigError:
        return True


def schedule_problems(config: TrainingConfig, microbatches: int) -> list[str]:
    """One line per problem of the schedule of a step of ``microbatches``: found, expected, what to change."""
    text = config.parallel.pipeline_schedule
    if text is None:
        return []
    from mt_megatron.pipeline.choice import parse

    try:
        choice = parse(text)
    except ConfigError as error:
        return [f"{error}."]
    chunks = config.virtual_pipeline_model_parallel_size or 1
    found = choice.problems(config.parallel.pipeline_model_parallel_size, chunks, microbatches)
    # The launch scripts' default leaves what it cannot run to Megatron-Core's own schedule.
    if found or choice.is_upstream or choice.is_default:
        return found
    for name in ("use_te_rng_tracker", "enable_cuda_graph"):
        if getattr(config.model, name):
            found.append(
                f"pipeline_schedule is {text} with {name}; expected it unset: random states are keyed by "
                f"micro-batch, which Transformer Engine's tracker and graphs do not allow. Leave "
                f"--{name.replace('_', '-')} out, or take 1f1b or interleaved."
            )
    return found


def transport_problems(config: TrainingConfig) -> list[str]:
    """One line per problem of the transport between pipeline stages that needs no machine to be seen."""
    text = config.parallel.p2p_transport
    if text in ("auto", "collective"):
        return []
    found = []
    if config.parallel.pipeline_model_parallel_size == 1:
        found.append(
            f"p2p_transport is {text} with pipeline_model_parallel_size 1; expected a size above 1, since "
            "one stage sends nothing. Leave --p2p-transport out or raise --pipeline-model-parallel-size."
        )
    if config.model.use_ring_exchange_p2p:
        found.append(
            f"p2p_transport is {text} with use_ring_exchange_p2p; expected one of the two. Leave "
            "--use-ring-exchange-p2p out, or take --p2p-transport collective."
        )
    return found
