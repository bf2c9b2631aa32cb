"""Checks that need the device or an earlier checkpoint, made by each process before it joins the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.errors import CheckpointError, ConfigError
from mt_megatron.models.parameters import padded_vocab_size
from mt_megatron.training.checkpoint_files import latest_checkpoint, read_manifest, resolve_checkpoint
from mt_megatron.training.config import TrainingConfig
from mt_megatron.training.data.tokenizer import load_tokenizer
from mt_megatron.training.init_from_hf import check_published
from mt_megatron.training.memory_estimate import memory_of
from mt_megatron.training.quantities import gibibytes

_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "normalization",
    "position_embedding_type",
    "untie_embeddings_and_output_weights",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "mtp_num_layers",
)
"""Options that decide which parameters there are and how large."""


def check_before_start(config: TrainingConfig, backend: Backend, world_size: int) -> list[str]:
    """One line for everything that may go wrong on this device.

    Raises ``ConfigError`` when the model cannot fit the device's memory, ``CheckpointError`` when
    the checkpoint to start from is of another model, ``DataError`` when the tokenizer is unreadable.
    """
    check_checkpoint(config)
    return memory_notes(config, backend, world_size)


def memory_notes(config: TrainingConfig, backend: Backend, world_size: int) -> list[str]:
    """What is to be said about memory before the start; nothing when the estimate fits.

    Raises ``ConfigError`` when weights, gradients and optimizer state alone do not fit and
    ``check_memory`` is on.
    """
    total = device_memory(backend, os.environ)
    if total is None:
        return []
    stages = memory_of(_complete(config), world_size, on_cpu=backend.device_type == "cpu").stages
    state = max(stages, key=lambda stage: stage.weights + stage.gradients + stage.optimizer)
    fixed = state.weights + state.gradients + state.optimizer
    device = f"{gibibytes(total)} GiB of {backend.device_name()}"
    if backend.device_type == "cpu":
        device += ", as its local processes share it"
    if fixed > total:
        experts = "" if config.model.num_moe_experts is None else "--expert-model-parallel-size, "
        line = (
            f"weights, gradients and optimizer state need {gibibytes(fixed)} GiB per process (pipeline stage "
            f"{state.stage}); expected at most the {device}. Raise {experts}--tensor-model-parallel-size or "
            "--pipeline-model-parallel-size, set --use-distributed-optimizer or --bf16, or choose a smaller "
            "model"
        )
        if config.launch.check_memory:
            raise ConfigError(f"{line}; --no-check-memory starts all the same.")
        return [f"WARNING: {line}. Going on as --no-check-memory asks."]
    worst = max(stages, key=lambda stage: stage.total)
    if worst.total > total:
        return [
            f"WARNING: the estimated peak is {gibibytes(worst.total)} GiB per process (pipeline stage "
            f"{worst.stage}, {gibibytes(worst.activations)} GiB of it activations), more than the {device}: "
            "this run may run out of memory. Lower --micro-batch-size or --seq-length, or use "
            "--recompute-granularity."
        ]
    return []


def device_memory(backend: Backend, environment: Mapping[str, str]) -> int | None:
    """Bytes that one process may use; None when unknown. Local processes on the CPU share the host's."""
    total = backend.total_memory()
    if total is None or backend.device_type != "cpu":
        return total
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    return total // max(1, int(local) if local.isdecimal() else 1)


def check_checkpoint(config: TrainingConfig) -> None:
    """Raise ``CheckpointError`` when the checkpoint that the run would start from is of another model."""
    folder = _start_folder(config)
    if folder is None:
        check_published(config)
        return
    found = _differences(read_manifest(folder), config)
    if found:
        raise CheckpointError(
            f"the checkpoint {folder} is of another model than this run's:\n"
            + "\n".join(f"- {line}" for line in found)
            + "\nSet these options as they were, or name another --save, --resume or --load."
        )


def _start_folder(config: TrainingConfig) -> Path | None:
    options = config.checkpoint
    if options.resume not in ("auto", "never"):
        return resolve_checkpoint(Path(options.resume))
    found = None
    if options.resume == "auto" and options.save is not None and Path(options.save).is_dir():
        try:
            found = latest_checkpoint(Path(options.save))
        except CheckpointError:
            # Whether an older one can take the place of a damaged one is decided where it is loaded.
            return None
    if found is None and options.load is not None:
        found = resolve_checkpoint(Path(options.load))
    return found


def _differences(document: Mapping[str, Any], config: TrainingConfig) -> list[str]:
    sections = document.get("config")
    before = sections.get("model") if isinstance(sections, Mapping) else None
    if not isinstance(before, Mapping):
        return []
    found = []
    for name in _SHAPE:
        now = getattr(config.model, name)
        # A file has lists, where a configuration has tuples.
        now = list(now) if isinstance(now, tuple) else now
        if name in before and before[name] != now:
            found.append(
                f"it was written with {name} {before[name]}; this run has {now}. "
                f"Set --{name.replace('_', '-')}."
            )
    vocabulary, now = before.get("vocab_size"), config.model.vocab_size
    if (
        isinstance(vocabulary, int)
        and now is not None
        and _padded(config, vocabulary) != _padded(config, now)
    ):
        found.append(f"it was written with vocab_size {vocabulary}; this run has {now}. Set --vocab-size.")
    return found


def _padded(config: TrainingConfig, vocab_size: int) -> int:
    return padded_vocab_size(
        vocab_size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel=config.parallel.tensor_model_parallel_size,
    )


def _complete(config: TrainingConfig) -> TrainingConfig:
    """``config`` with the tokenizer's vocabulary where it names none."""
    if config.model.vocab_size is not None:
        return config
    size = load_tokenizer(config.data).vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))
