"""Entries of ``config.json`` that are particular to an architecture, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_megatron.convert.hf.config_entries import Reader, wrong_entry
from mt_megatron.errors import ConfigError
from mt_megatron.layers.transformer_fields import moe_pattern

_Options = dict[str, Any]


def read_llama(reader: Reader) -> _Options:
    return {}


def write_llama(model: Any) -> dict[str, Any]:
    _require(model, num_moe_experts=None, qk_layernorm=False, add_qkv_bias=False)
    return {"attention_bias": False, "mlp_bias": False, "head_dim": _head(model)}


def read_mixtral(reader: Reader) -> _Options:
    reader.require("sliding_window", None)
    return {
        **_experts(reader, "num_local_experts"),
        "moe_aux_loss_coeff": reader.number("router_aux_loss_coef", 0.001),
        "moe_router_load_balancing_type": "aux_loss",
    }


def write_mixtral(model: Any) -> dict[str, Any]:
    _require(
        model,
        moe_layer_freq=1,
        moe_shared_expert_intermediate_size=None,
        moe_router_pre_softmax=False,
        qk_layernorm=False,
        add_qkv_bias=False,
        **_PLAIN_ROUTER,
    )
    return {
        "intermediate_size": _width(model),
        "head_dim": _head(model),
        "num_local_experts": model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "router_aux_loss_coef": model.moe_aux_loss_coeff,
        "output_router_logits": False,
        "sliding_window": None,
    }


def read_qwen2(reader: Reader) -> _Options:
    _no_window(reader)
    return {"add_qkv_bias": True}


def write_qwen2(model: Any) -> dict[str, Any]:
    if not model.add_qkv_bias:
        raise ConfigError(
            "a dense qwen without query and key norms is published as Qwen2, which has add_qkv_bias; "
            "expected one of both to be set"
        )
    # transformers divides without the entry; earlier readers know no other size.
    plain = model.hidden_size == _head(model) * model.num_attention_heads
    return _without_window(model) | ({} if plain else {"head_dim": _head(model)})


def read_qwen3(reader: Reader) -> _Options:
    _no_window(reader)
    return {"qk_layernorm": True}


def write_qwen3(model: Any) -> dict[str, Any]:
    _require(model, add_qkv_bias=False)
    return _without_window(model) | {"attention_bias": False, "head_dim": _head(model)}


def read_qwen3_moe(reader: Reader) -> _Options:
    _no_window(reader)
    step, only = reader.integer("decoder_sparse_step", 1), reader.get("mlp_only_layers", None)
    layers = reader.integer("num_hidden_layers")
    dense = _layer_numbers("mlp_only_layers", only, layers)
    pattern = [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]
    return {
        "qk_layernorm": True,
        **_experts(reader, "num_experts"),
        "moe_ffn_hidden_size": reader.integer("moe_intermediate_size"),
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_pre_softmax": not reader.flag("norm_topk_prob", False),
        "moe_aux_loss_coeff": reader.number("router_aux_loss_coef", 0.001),
        "moe_router_load_balancing_type": "aux_loss",
    }


def write_qwen3_moe(model: Any) -> dict[str, Any]:
    _require(model, add_qkv_bias=False, moe_shared_expert_intermediate_size=None, **_PLAIN_ROUTER)
    if not model.qk_layernorm:
        raise ConfigError(
            "a qwen with experts is published as Qwen3, which has qk_layernorm; expected it set"
        )
    pattern = moe_pattern(model.moe_layer_freq, model.num_layers)
    return _without_window(model) | {
        "attention_bias": False,
        "head_dim": _head(model),
        "moe_intermediate_size": _width(model),
        "num_experts": model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, is_moe in enumerate(pattern) if not is_moe],
        "router_aux_loss_coef": model.moe_aux_loss_coeff,
        "output_router_logits": False,
    }


def read_deepseek_v2(reader: Reader) -> _Options:
    reader.require("topk_method", "greedy", "group_limited_greedy")
    reader.require("scoring_func", "softmax")
    # transformers does not read it: weights are never normalised there.
    reader.require("norm_topk_prob", False, None)
    method = reader.get("topk_method", "greedy")
    # Of the other method.
    reader.known |= {"n_group", "topk_group"}
    options = {
        **_deepseek(reader),
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": _unless_one(reader.number("routed_scaling_factor", 1.0)),
    }
    if method == "group_limited_greedy":
        options |= {
            "moe_router_num_groups": reader.integer("n_group"),
            "moe_router_group_topk": reader.integer("topk_group"),
            "moe_router_group_score_topk": 1,
        }
    return options


def write_deepseek_v2(model: Any) -> dict[str, Any]:
    _require(model, moe_router_enable_expert_bias=False, mtp_num_layers=None, moe_router_pre_softmax=True)
    grouped = model.moe_router_num_groups is not None
    if grouped and _scores_of_group(model) != 1:
        raise ConfigError(
            "DeepSeek-V2 judges a group by its best score; expected moe_router_group_score_topk 1, found "
            f"{_scores_of_group(model)}"
        )
    return _deepseek_entries(model) | {
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "seq_aux": model.moe_router_load_balancing_type == "seq_aux_loss",
        "aux_loss_alpha": model.moe_aux_loss_coeff,
    }


def read_deepseek_v3(reader: Reader) -> _Options:
    reader.require("topk_method", "noaux_tc")
    reader.require("scoring_func", "sigmoid")
    reader.require("norm_topk_prob", True)
    reader.require("rope_interleave", True)
    groups, used = reader.integer("n_group"), reader.integer("topk_group")
    if used > groups:
        raise wrong_entry("topk_group", used, f"at most n_group = {groups}")
    if reader.integer("num_experts_per_tok") == 1:
        raise wrong_entry("num_experts_per_tok", 1, "at least 2: the only weight would be normalised to 1")
    options = {
        **_deepseek(reader),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": _unless_one(reader.number("routed_scaling_factor", 2.5)),
    }
    if groups > 1:
        options |= {
            "moe_router_num_groups": groups,
            "moe_router_group_topk": used,
            "moe_router_group_score_topk": 2,
        }
    depths = reader.integer("num_nextn_predict_layers", 0, least=0)
    if depths:
        options["mtp_num_layers"] = depths
    return options


def write_deepseek_v3(model: Any) -> dict[str, Any]:
    if not model.moe_router_enable_expert_bias:
        raise ConfigError(
            "DeepSeek-V3 has an expert bias; expected moe_router_enable_expert_bias to be set for a model "
            "with sigmoid scores"
        )
    grouped = model.moe_router_num_groups is not None
    if grouped and _scores_of_group(model) != 2:
        raise ConfigError(
            "DeepSeek-V3 judges a group by its two best scores; expected moe_router_group_score_topk 2, "
            f"found {_scores_of_group(model)}"
        )
    return _deepseek_entries(model) | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "num_nextn_predict_layers": model.mtp_num_layers or 0,
        "seq_aux": True,
        "aux_loss_alpha": model.moe_aux_loss_coeff,
    }


def require_published(model: Any) -> None:
    """Raise ``ConfigError`` for what no published architecture has."""
    _require(
        model,
        normalization="RMSNorm",
        activation_func="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        layernorm_zero_centered_gamma=False,
        rotary_seq_len_interpolation_factor=None,
    )


def _deepseek(reader: Reader) -> _Options:
    reader.require("ep_size", 1)
    # transformers does not read it: all layers behind the dense ones have experts there.
    reader.require("moe_layer_freq", 1)
    heads = reader.integer("num_attention_heads")
    reader.require("num_key_value_heads", heads, None)
    # Rotary frequencies follow from it in transformers.
    reader.require("head_dim", reader.integer("qk_rope_head_dim"))
    # The norms of the latent vectors have this epsilon in transformers, whatever the others have.
    reader.require("rms_norm_eps", LATENT_EPSILON)
    layers, first = reader.integer("num_hidden_layers"), reader.integer("first_k_dense_replace", least=0)
    shared, width = reader.integer("n_shared_experts"), reader.integer("moe_intermediate_size")
    pattern = [int(index >= first) for index in range(layers)]
    if not any(pattern):
        raise wrong_entry(
            "first_k_dense_replace", first, f"fewer than num_hidden_layers = {layers}: some layer has experts"
        )
    options: _Options = {
        **_experts(reader, "n_routed_experts"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_dtype": "fp32",
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": reader.optional_integer("q_lora_rank"),
        "kv_lora_rank": reader.integer("kv_lora_rank"),
        "qk_head_dim": reader.integer("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": reader.integer("qk_rope_head_dim"),
        "v_head_dim": reader.integer("v_head_dim"),
        "moe_aux_loss_coeff": reader.number("aux_loss_alpha", 0.001),
        "moe_router_load_balancing_type": "seq_aux_loss" if reader.get("seq_aux", True) else "aux_loss",
    }
    options["moe_shared_expert_intermediate_size"] = shared * width
    return options


def _deepseek_entries(model: Any) -> dict[str, Any]:
    _require(model, multi_latent_attention=True, qk_layernorm=True, layernorm_epsilon=LATENT_EPSILON)
    if model.num_moe_experts is None:
        raise ConfigError("a DeepSeek-V2 or V3 has experts; found num_moe_experts unset")
    pattern = moe_pattern(model.moe_layer_freq, model.num_layers)
    dense, width = pattern.index(1) if 1 in pattern else model.num_layers, _width(model)
    if not all(pattern[dense:]):
        raise ConfigError(
            "a published DeepSeek has dense layers at its beginning only; found moe_layer_freq "
            f"{list(pattern)}"
        )
    shared = model.moe_shared_expert_intermediate_size or 0
    if shared % width or not shared:
        raise ConfigError(
            f"a published DeepSeek has whole shared experts, at least one; expected "
            f"moe_shared_expert_intermediate_size {shared} to be a multiple of moe_ffn_hidden_size {width}"
        )
    return {
        "attention_bias": False,
        "num_key_value_heads": model.num_attention_heads,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "moe_intermediate_size": width,
        "n_routed_experts": model.num_moe_experts,
        "n_shared_experts": shared // width,
        "num_experts_per_tok": model.moe_router_topk,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "ep_size": 1,
    }


_PLAIN_ROUTER: Mapping[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_topk_scaling_factor": None,
}


def _experts(reader: Reader, count: str) -> _Options:
    return {
        "num_moe_experts": reader.integer(count),
        "moe_router_topk": reader.integer("num_experts_per_tok"),
        "moe_token_dispatcher_type": "alltoall",
    }


def _no_window(reader: Reader) -> None:
    reader.require("use_sliding_window", False)
    # Their meaning depends on it.
    reader.known |= {"sliding_window", "max_window_layers"}


def _layer_numbers(name: str, value: Any, layers: int) -> set[int]:
    found = [] if value is None else value
    if not isinstance(found, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in found):
        raise wrong_entry(name, value, f"a list of numbers of layers from 0 to {layers - 1}")
    return set(found)


def _without_window(model: Any) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": model.num_layers,
    }


def _scores_of_group(model: Any) -> int:
    return int(model.moe_router_group_score_topk or model.moe_router_topk // model.moe_router_group_topk)


def _head(model: Any) -> int:
    return int(model.kv_channels or model.hidden_size // model.num_attention_heads)


def _width(model: Any) -> int:
    return int(model.moe_ffn_hidden_size or model.ffn_hidden_size)


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else float(factor)


def _require(model: Any, **expected: Any) -> None:
    for name, value in expected.items():
        found = getattr(model, name)
        if found != value:
            raise ConfigError(
                f"{name} is {found!r}; expected {value!r}: the published architecture of the family "
                f"{model.family} has nothing else"
            )


LATENT_EPSILON = 1e-6
"""Of the norms of DeepSeek's latent vectors in transformers."""
