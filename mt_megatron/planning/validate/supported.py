"""Checks before all others: backend installed, numbers within limits, no option that is not offered."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from mt_megatron.backends.registry import check_name
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.config.types import options
from mt_megatron.errors import BackendError


def backend_problems(config: TrainingConfig) -> list[str]:
    """A line when no backend has that name; whether its device is here is seen when torch is imported."""
    try:
        check_name(config.launch.backend)
    except BackendError as error:
        return [f"--backend: {error}"]
    return []


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


_TE = "it needs Transformer Engine's layers, which this version does not use"
_APEX = "it needs Apex's kernels, which this version does not use"

UNSUPPORTED: Mapping[str, str] = {
    "use_te_rng_tracker": _TE,
    "tp_comm_overlap": _TE,
    "fp8_dot_product_attention": _TE,
    "fp8_multi_head_attention": _TE,
    "activation_func_fp8_input_store": "it stores activations without any scale",
    "cpu_offloading": _TE,
    "enable_cuda_graph": _TE,
    "external_cuda_graph": _TE,
    "disable_parameter_transpose_cache": _TE,
    "apply_rope_fusion": "it needs Apex's or Transformer Engine's kernel, which this version does not use",
    "persist_layer_norm": _APEX,
    "memory_efficient_layer_norm": _APEX,
    "masked_softmax_fusion": "core attention is torch's scaled_dot_product_attention",
    "variable_seq_lengths": "every sequence has train.seq_length tokens",
    "use_ring_exchange_p2p": "it needs a torch built with ring_exchange",
    "num_microbatches_with_partial_activation_checkpoints": "the trainer's forward step does not read it",
    "log_num_zeros_in_grad": "the trainer makes its updates without counting them",
    "apply_residual_connection_post_layernorm": "no layer of Megatron-Core 0.9.0 reads it",
    "fp32_residual_connection": "the first layer of Megatron-Core 0.9.0 casts the residual to its own dtype",
    "moe_per_layer_logging": "nothing reads it: every record of a mixture has the load of each layer anyway",
    "overlap_param_gather_with_optimizer_step": "distributed checkpoints cannot be written with it",
}
"""Option -> why a value other than its default is refused."""

_WITHOUT_LATENT_ATTENTION = ("llama", "mixtral", "qwen")

_NOT_OF_BERT: Mapping[str, Any] = {
    "num_moe_experts": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "qk_layernorm": False,
    "window_size": None,
    "mock_data": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "context_parallel_size": 1,
}
"""Option -> the only value with which ``BertModel`` and the samples of masked words do what it says."""

_PACKAGES = (("tensorboard_dir", "tensorboard", "tensorboard"), ("wandb_project", "wandb", "wandb"))
"""Option, the package that it needs, and the extra of this project that brings it."""


def support_problems(config: TrainingConfig, *, packages: bool = True) -> list[str]:
    """One line for every option that is set and cannot be honoured. ``packages`` says whether what it
    needs has to be installed here."""
    values = {name: value for section in config.to_dict().values() for name, value in section.items()}
    found = []
    for name, reason in UNSUPPORTED.items():
        option = options()[name]
        if values[name] != option.default:
            found.append(
                f"{name} is {values[name]}; expected {option.default}: {reason}. Leave {option.flag} out."
            )
    engine = config.model.transformer_impl == "transformer_engine"
    if packages and engine and importlib.util.find_spec("transformer_engine") is None:
        found.append(
            "transformer_impl is transformer_engine, which is not installed; expected auto or local. Install "
            "Transformer Engine or leave --transformer-impl out."
        )
    for name, package, extra in _PACKAGES:
        if packages and values[name] is not None and importlib.util.find_spec(package) is None:
            found.append(
                f"{name} is {values[name]}, and the package {package} is not installed; expected it. Install "
                f'it with `pip install "mt_megatron[{extra}]"`, or leave {options()[name].flag} out.'
            )
    if config.model.multi_latent_attention and config.model.family in _WITHOUT_LATENT_ATTENTION:
        found.append(
            f"multi_latent_attention is on; expected off: the family {config.model.family} has none. Leave "
            "--multi-latent-attention out or choose --family deepseek."
        )
    if config.model.masked_words:
        found += [
            f"{name} is {values[name]}; expected {value}: the family bert has nothing else. Leave "
            f"{options()[name].flag} out or choose another --family."
            for name, value in _NOT_OF_BERT.items()
            if (values[name] or value) != value
        ]
        found += [
            f"{name} is {values[name]}; expected {range_}. Set {options()[name].flag}."
            for name, range_, fits in (
                ("mask_prob", "0 < share < 1", 0 < config.data.mask_prob < 1),
                ("short_seq_prob", "0 <= share <= 1", 0 <= config.data.short_seq_prob <= 1),
            )
            if not fits
        ]
    if config.model.family == "llama" and config.model.num_moe_experts is not None:
        found.append(
            f"num_moe_experts is {config.model.num_moe_experts}; expected none: the family llama is dense. "
            "Leave --num-moe-experts out or choose another --family."
        )
    return found
