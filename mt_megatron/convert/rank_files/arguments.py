"""Megatron-LM 0.9's ``args``, which its checkpoints carry, to our options and back.

They come in a pickle, of which ``torch.load(weights_only=True)`` builds named plain classes alone.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import CheckpointError
from mt_megatron.layers.transformer_fields import ROPE_TYPES_OF
from mt_megatron.patches.compat.torch_numpy import trusted_globals

COMMON = "common.pt"

_SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "make_vocab_size_divisible_by",
    "vocab_size",
    "normalization",
    "untie_embeddings_and_output_weights",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_grouped_gemm",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_group_score_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_dtype",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "mtp_num_layers",
    "bf16",
    "fp16",
)
"""Names that mean the same on both sides; the later ones are of later versions and of ours."""


def load_trusted(path: Path, *, mmap: bool = False) -> Any:
    """What ``torch.save`` wrote to ``path``, without running code of the file's choosing. Raises
    ``CheckpointError`` that names a class which is not on the list."""
    try:
        with torch.serialization.safe_globals(trusted_globals()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(
            f"{path} is not read: {reason} Only plain data and Megatron's own settings are built from a "
            "pickle; save it again without that class"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Give a complete copy of it") from error


def read_common(folder: Path) -> Mapping[str, Any]:
    """``common.pt`` of a distributed checkpoint; empty when there is none."""
    if not (folder / COMMON).is_file():
        return {}
    found = load_trusted(folder / COMMON)
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / COMMON} holds {type(found).__name__}, expected a dictionary")
    return found


def options_from_arguments(args: argparse.Namespace | None) -> dict[str, Any]:
    """Our model options from Megatron-LM's ``args``; none without them."""
    if args is None:
        return {}
    given = vars(args)
    options = {name: given[name] for name in _SAME if given.get(name) is not None}
    options |= _vocab_size(given)
    if given.get("swiglu"):
        options |= {"activation_func": "silu", "gated_linear_unit": True}
    elif given.get("squared_relu"):
        options["activation_func"] = "squared_relu"
    if given.get("group_query_attention") and given.get("num_query_groups"):
        options["num_query_groups"] = given["num_query_groups"]
    if given.get("norm_epsilon") is not None:
        options["layernorm_epsilon"] = given["norm_epsilon"]
    if given.get("apply_layernorm_1p"):
        options["layernorm_zero_centered_gamma"] = True
    if given.get("num_experts"):
        options["num_moe_experts"] = given["num_experts"]
        options = _capacity(options, given)
    else:
        for name in [each for each in options if each.startswith("moe_")]:
            del options[name]
    if not given.get("multi_latent_attention"):
        for name in _LATENT:
            options.pop(name, None)
    if not given.get("model_family"):
        options = _as_later_versions_stretch(options)
    if given.get("use_rope_scaling"):
        options |= {
            "rope_type": "llama3",
            "rotary_scaling_factor": float(given.get("rope_scaling_factor", 8.0)),
            "original_max_position_embeddings": 8192,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 4.0,
        }
    options["family"] = given.get("model_family") or _family(options)
    return options


def arguments_of(
    config: TrainingConfig,
    padded_vocab_size: int,
    iteration: int,
    layers: list[int] | None = None,
    progress: Mapping[str, Any] | None = None,
) -> argparse.Namespace:
    """Megatron-LM's ``args`` for ``config``, as far as loading a checkpoint asks for them.

    ``layers`` are the layers of every virtual stage where they are not as many everywhere. ``progress`` is of
    a run that goes on, with its optimizer; None: the checkpoint holds weights.
    """
    model, parallel = config.model, config.parallel
    values = {name: getattr(model, name) for name in _SAME if name not in ("bf16", "fp16")}
    grouped = model.num_query_groups not in (None, model.num_attention_heads)
    values |= {
        "bf16": config.train.bf16,
        "fp16": config.train.fp16,
        "params_dtype": getattr(torch, config.params_dtype),
        "swiglu": model.activation_func == "silu" and model.gated_linear_unit,
        "squared_relu": model.activation_func == "squared_relu",
        "group_query_attention": grouped,
        "num_query_groups": model.num_query_groups if grouped else 1,
        "norm_epsilon": model.layernorm_epsilon,
        "apply_layernorm_1p": model.layernorm_zero_centered_gamma,
        "num_experts": model.num_moe_experts,
        "moe_token_dispatcher_type": model.moe_token_dispatcher_type,
        "model_family": model.family,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "padded_vocab_size": padded_vocab_size,
        "tokenizer_type": config.data.tokenizer_type,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "pipeline_model_parallel_layout": layers,
        "transformer_impl": _impl(model.transformer_impl),
        "iteration": iteration,
        "consumed_train_samples": 0 if progress is None else int(progress.get("consumed_samples", 0)),
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "no_save_optim": progress is None,
        "no_save_rng": True,
        "use_distributed_optimizer": progress is not None and parallel.use_distributed_optimizer,
    }
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return argparse.Namespace(**plain)


_LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)


def _vocab_size(given: Mapping[str, Any]) -> dict[str, int]:
    """The vocabulary with its end-of-document token.

    Megatron-LM's ``NullTokenizer`` adds that token to ``--vocab-size``, which ``args`` keep as it was given.
    Files of ours name their family, and their ``vocab_size`` counts every token.
    """
    size = given.get("vocab_size")
    if size is None:
        return {}
    adds_end_of_document = given.get("tokenizer_type") == "NullTokenizer" and not given.get("model_family")
    return {"vocab_size": int(size) + adds_end_of_document}


def _capacity(options: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with a dispatcher where experts have a capacity, which the default, ``allgather``, does not
    know; a later version's ``flex`` sends the same tokens. Upstream takes a capacity below 0 for none."""
    found = dict(options)
    if found.get("moe_expert_capacity_factor", -1) < 0:
        found.pop("moe_expert_capacity_factor", None)
        return found
    named = given.get("moe_token_dispatcher_type")
    found["moe_token_dispatcher_type"] = named if named == "alltoall_seq" else "alltoall"
    return found


def _as_later_versions_stretch(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with the rotary positions that Megatron-Core 0.12 computes for them.

    Latent attention is stretched by YaRN unless ``rope_type`` says otherwise, from
    ``max_position_embeddings`` where the original length has no name of its own. Numbers that it reads
    nowhere, such as an ordinary attention's ``mscale_all_dim`` of 1, are left out.
    """
    found = dict(options)
    latent = found.get("multi_latent_attention")
    kind = found.setdefault("rope_type", "yarn") if latent else found.get("rope_type", "rope")
    if kind == "yarn" and "max_position_embeddings" in found:
        found.setdefault("original_max_position_embeddings", found["max_position_embeddings"])
    for name, kinds in ROPE_TYPES_OF.items():
        # The factor counts there for latent attention's softmax without any stretching: it is not lost.
        if kind not in kinds and not (latent and name == "rotary_scaling_factor"):
            found.pop(name, None)
    return found


def _impl(asked: str) -> str:
    return "transformer_engine" if asked == "transformer_engine" else "local"


def _family(options: Mapping[str, Any]) -> str:
    if options.get("multi_latent_attention"):
        return "deepseek"
    if options.get("qk_layernorm") or options.get("add_qkv_bias"):
        return "qwen"
    return "mixtral" if "num_moe_experts" in options else "llama"
