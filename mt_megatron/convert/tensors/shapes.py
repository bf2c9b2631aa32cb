"""Tensors of an unsharded Megatron model: shape by the configuration, and the dimension
along which tensor parallelism divides it (Megatron-Core 0.12's modules)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mt_megatron.convert.tensors.state_names import kind_of, weight_name
from mt_megatron.errors import CheckpointError

Shape = tuple[int, ...]

COLUMN, ROW = 0, 1
"""The dimension of a weight that a column-parallel and a row-parallel linear divide."""

_KINDS: tuple[tuple[str, int | None, Callable[[Any], Shape]], ...] = (
    (r"embedding\.word_embeddings\.weight", COLUMN, lambda m: (m.vocab_size, m.hidden_size)),
    (r"output_layer\.weight", COLUMN, lambda m: (m.vocab_size, m.hidden_size)),
    (r"(input|pre_mlp|final)_layernorm\.weight", None, lambda m: (m.hidden_size,)),
    (r"(enorm|hnorm)\.weight", None, lambda m: (m.hidden_size,)),
    (r"eh_proj\.weight", COLUMN, lambda m: (m.hidden_size, 2 * m.hidden_size)),
    (r"linear_qkv\.weight", COLUMN, lambda m: (_qkv(m), m.hidden_size)),
    (r"linear_qkv\.bias", COLUMN, lambda m: (_qkv(m),)),
    (r"linear_proj\.weight", ROW, lambda m: (m.hidden_size, _attention_output(m))),
    (r"q_layernorm\.weight", None, lambda m: (m.q_lora_rank if m.multi_latent_attention else _head(m),)),
    (r"k_layernorm\.weight", None, lambda m: (_head(m),)),
    (r"kv_layernorm\.weight", None, lambda m: (m.kv_lora_rank,)),
    (r"linear_q_proj\.weight", COLUMN, lambda m: (_latent_query(m), m.hidden_size)),
    (r"linear_q_down_proj\.weight", None, lambda m: (m.q_lora_rank, m.hidden_size)),
    (r"linear_q_up_proj\.weight", COLUMN, lambda m: (_latent_query(m), m.q_lora_rank)),
    (
        r"linear_kv_down_proj\.weight",
        None,
        lambda m: (m.kv_lora_rank + m.qk_pos_emb_head_dim, m.hidden_size),
    ),
    (
        r"linear_kv_up_proj\.weight",
        COLUMN,
        lambda m: (m.num_attention_heads * (m.qk_head_dim + m.v_head_dim), m.kv_lora_rank),
    ),
    (r"router\.weight", None, lambda m: (m.num_moe_experts, m.hidden_size)),
    (r"router\.expert_bias", None, lambda m: (m.num_moe_experts,)),
    (r"local_experts\.\d+\.linear_fc1\.weight", COLUMN, lambda m: _fc1(m, _expert(m))),
    (r"local_experts\.\d+\.linear_fc2\.weight", ROW, lambda m: (m.hidden_size, _expert(m))),
    (
        r"shared_experts\.linear_fc1\.weight",
        COLUMN,
        lambda m: _fc1(m, m.moe_shared_expert_intermediate_size),
    ),
    (
        r"shared_experts\.linear_fc2\.weight",
        ROW,
        lambda m: (m.hidden_size, m.moe_shared_expert_intermediate_size),
    ),
    (r"mlp\.linear_fc1\.weight", COLUMN, lambda m: _fc1(m, m.ffn_hidden_size)),
    (r"mlp\.linear_fc2\.weight", ROW, lambda m: (m.hidden_size, m.ffn_hidden_size)),
)
_PATTERNS = tuple((re.compile(rf"(?:.*\.)?{tail}"), axis, shape) for tail, axis, shape in _KINDS)

_LIKE_GPT_2 = re.compile(
    r"position_embeddings\.weight$|layernorm\.bias$|linear_(?:proj|fc1|fc2)\.bias$",
)

_WITH_STATE = re.compile(r"(.*\.(?:linear_\w+|eh_proj))\.weight")


def shape_of(name: str, model: Any) -> Shape:
    """The shape of the tensor ``name`` without padding; ``model`` is a ``ModelConfig``."""
    return _kind(name)[1](model)


def split_axis(name: str) -> int | None:
    """The dimension that tensor parallelism divides; None: every process holds all of it."""
    return _kind(name)[0]


def extra_state_of(name: str, *, transformer_engine: bool) -> str | None:
    """The name of the (empty) extra state that Megatron's linears keep beside a weight, if it is one."""
    if "_down_proj." in name and not transformer_engine:
        return None  # ``layers.mla.spec`` has none, and takes none when it is loaded strictly.
    matched = _WITH_STATE.fullmatch(name) if kind_of(name) is None else None
    return None if matched is None else f"{matched[1]}._extra_state"


def require_one_dtype(stored: Iterable[tuple[str, str, torch.dtype]]) -> None:
    """Raise ``CheckpointError`` where tensors that lie in one have different types. ``stored`` are the name
    of the one, that of the tensor, and its type."""
    first: dict[str, tuple[str, torch.dtype]] = {}
    for together, name, dtype in stored:
        other, its = first.setdefault(together, (name, dtype))
        if its != dtype:
            raise CheckpointError(
                f"{other} is {str(its).removeprefix('torch.')} and {name} is "
                f"{str(dtype).removeprefix('torch.')}, and a Megatron checkpoint holds both in one tensor, "
                f"{together}. Choose a type for all with --dtype"
            )


def _kind(name: str) -> tuple[int | None, Callable[[Any], Shape]]:
    for pattern, axis, shape in _PATTERNS:
        if pattern.fullmatch(weight_name(name)):
            return axis, shape
    if _LIKE_GPT_2.search(weight_name(name)):
        raise CheckpointError(
            f"{name} belongs to a GPT-2-like model (learned positions, LayerNorm with bias or linears with "
            "bias), which is not converted. Models with RMSNorm, rotary positions and --disable-bias-linear "
            "are: Llama, Mixtral, Qwen, DeepSeek"
        )
    raise CheckpointError(f"{name} is no tensor of a model that is converted here; Megatron has no such name")


def _head(model: Any) -> int:
    return int(model.kv_channels or model.hidden_size // model.num_attention_heads)


def _qkv(model: Any) -> int:
    groups = model.num_query_groups or model.num_attention_heads
    return int((model.num_attention_heads + 2 * groups) * _head(model))


def _latent_query(model: Any) -> int:
    return int(model.num_attention_heads * (model.qk_head_dim + model.qk_pos_emb_head_dim))


def _attention_output(model: Any) -> int:
    head = model.v_head_dim if model.multi_latent_attention else _head(model)
    return int(model.num_attention_heads * head)


def _expert(model: Any) -> int:
    return int(model.moe_ffn_hidden_size or model.ffn_hidden_size)


def _fc1(model: Any, width: int) -> Shape:
    return ((2 if model.gated_linear_unit else 1) * width, model.hidden_size)
