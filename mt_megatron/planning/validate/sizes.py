"""Limits of single numbers: beyond them one is a slip of the finger, not a model or a run."""

from __future__ import annotations

from collections.abc import Mapping

from mt_megatron.config.schema import TrainingConfig

_INT32 = 2**31 - 1
_SEED = 2**32 - 2**20

LIMITS: Mapping[str, int] = {
    "num_layers": 10_000,
    "hidden_size": 2**24,
    "ffn_hidden_size": 2**26,
    "num_attention_heads": 2**16,
    "num_query_groups": 2**16,
    "kv_channels": 2**16,
    "vocab_size": 2**28,
    "make_vocab_size_divisible_by": 2**20,
    "max_position_embeddings": _INT32,
    "seq_length": _INT32,
    "micro_batch_size": 2**20,
    "global_batch_size": _INT32,
    "train_iters": _INT32,
    "eval_iters": _INT32,
    "lr_decay_iters": _INT32,
    "lr_warmup_iters": _INT32,
    "num_workers": 1024,
    "tensor_model_parallel_size": 2**16,
    "pipeline_model_parallel_size": 2**16,
    "context_parallel_size": 2**16,
    "expert_model_parallel_size": 2**16,
    "virtual_pipeline_model_parallel_size": 10_000,
    "seed": _SEED,
}
"""Option -> the largest value that makes sense. numpy's generator takes seeds below 2**32, and the ranks
add a little to theirs."""

_MOST_INCREMENTS = 100_000

_MINUTES = 60 * 24 * 365
"""A timeout beyond a year overflows what torch takes."""


def size_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    values = {name: value for section in config.to_dict().values() for name, value in section.items()}
    limits: dict[str, float] = {**LIMITS, "distributed_timeout_minutes": _MINUTES}
    found = []
    for name, limit in limits.items():
        if values[name] is not None and values[name] > limit:
            found.append(
                f"{name} is {values[name]}; expected at most {limit}. Set --{name.replace('_', '-')}."
            )
    found.extend(_increments(config))
    peak = config.logging.peak_tflops
    if peak is not None and peak <= 0:
        found.append(f"peak_tflops is {peak}; expected more than 0. Set --peak-tflops.")
    return found


def _increments(config: TrainingConfig) -> list[str]:
    rampup, final, found = config.train.rampup_batch_size, config.train.global_batch_size, []
    if rampup is not None and final is not None and rampup[1] >= 1:
        count = (final - rampup[0]) // rampup[1]
        if count > _MOST_INCREMENTS:
            found.append(
                f"rampup_batch_size is {' '.join(map(str, rampup))}, which makes {count} increments up to "
                f"{final}; expected at most {_MOST_INCREMENTS}. Set --rampup-batch-size."
            )
    return found
