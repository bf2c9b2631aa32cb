"""Checks of a batch size that ramps up, at every size it will have."""

from __future__ import annotations

from mt_megatron.config.rampup import batch_sizes
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.validate.schedule import runs_upstream, schedule_problems


def rampup_problems(config: TrainingConfig, world_size: int) -> list[str]:
    """One line per problem: found, expected, what to change."""
    rampup = config.train.rampup_batch_size
    if rampup is None:
        return []
    start, increment, samples = rampup
    option = f"rampup_batch_size is {start} {increment} {samples}"
    if start < 1 or increment < 1 or samples < 0:
        return [
            f"{option}; expected a first size and an increment of at least 1, and a number of samples of at "
            "least 0. Set --rampup-batch-size START INCREMENT SAMPLES."
        ]
    final = config.train.global_batch_size
    if final is None:
        return [
            f"{option} without global_batch_size; expected the size to ramp up to. Set --global-batch-size."
        ]
    if start > final or (final - start) % increment:
        return [
            f"{option} with global_batch_size {final}; expected a start of at most that, and whole "
            "increments in between. Change --rampup-batch-size or --global-batch-size."
        ]
    try:
        round_size = config.train.micro_batch_size * config.data_parallel_size(world_size)
    except ConfigError:
        return []  # parallel_problems names it.
    sizes = batch_sizes(rampup, final).all()
    return [*_whole_rounds(option, sizes, round_size), *_whole_groups(config, option, sizes, round_size)]


def _whole_rounds(option: str, sizes: list[int], round_size: int) -> list[str]:
    if round_size < 1:
        return []  # train_problems names it.
    wrong = next((size for size in sizes if size % round_size), None)
    if wrong is None:
        return []
    return [
        f"{option}, which makes a global batch of {wrong}; expected multiples of micro_batch_size x "
        f"data-parallel size = {round_size}. Change --rampup-batch-size or --micro-batch-size."
    ]


def _whole_groups(config: TrainingConfig, option: str, sizes: list[int], round_size: int) -> list[str]:
    stages = config.parallel.pipeline_model_parallel_size
    if round_size < 1:
        return []
    if not runs_upstream(config):
        return _scheduled(config, option, sizes, round_size)
    if config.virtual_pipeline_model_parallel_size is None:
        return []
    wrong = next((size for size in sizes if size % round_size == 0 and size // round_size % stages), None)
    if wrong is None:
        return []
    return [
        f"{option}, which makes a step of {wrong // round_size} micro-batches; expected multiples of "
        f"pipeline_model_parallel_size = {stages} under the interleaved schedule. Change --rampup-batch-size."
    ]


def _scheduled(config: TrainingConfig, option: str, sizes: list[int], round_size: int) -> list[str]:
    for size in sizes:
        found = schedule_problems(config, size // round_size) if size % round_size == 0 else []
        if found:
            return [
                f"{option}, which makes a step of {size // round_size} micro-batches: {found[0]} Or change "
                "--rampup-batch-size."
            ]
    return []
