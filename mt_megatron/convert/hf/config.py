"""``config.json`` of a published folder to options of ours and back, by ``model_type``.

What a published configuration says and a model here cannot do is an error that names it; what it says
about other things than the model (caches, tokens, dtypes) is kept for the way back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_megatron.config.field_kinds import Kind, changes
from mt_megatron.config.types import options
from mt_megatron.convert.hf import families
from mt_megatron.convert.hf.class_fields import read_by_class
from mt_megatron.convert.hf.config_entries import Reader, same, wrong_entry
from mt_megatron.convert.hf.rope import ENTRIES, rope_options, rope_settings
from mt_megatron.errors import CheckpointError, ConfigError

Options = dict[str, Any]
"""Values by option name."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One ``model_type``."""

    family: str
    """Our model family."""

    name: str
    """The class in transformers that ``architectures`` names."""

    read: Callable[[Reader], Options]
    """The options beside those that all architectures have."""

    write: Callable[[Any], dict[str, Any]]
    """The entries beside those that all architectures have, from a ``ModelConfig``."""

    defaults: Mapping[str, Any]
    """What transformers takes for entries that are not there, where the function depends on them."""

    derived: frozenset[str] = frozenset()
    """Entries for which it takes null and computes them from others."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        family="llama",
        name="LlamaForCausalLM",
        read=families.read_llama,
        write=families.write_llama,
        defaults={"num_key_value_heads": None, "head_dim": None},
        derived=frozenset({"num_key_value_heads", "head_dim"}),
    ),
    "mixtral": Architecture(
        family="mixtral",
        name="MixtralForCausalLM",
        read=families.read_mixtral,
        write=families.write_mixtral,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1000000.0,
        },
        derived=frozenset({"head_dim"}),
    ),
    "deepseek_v2": Architecture(
        family="deepseek",
        name="DeepseekV2ForCausalLM",
        read=families.read_deepseek_v2,
        write=families.write_deepseek_v2,
        defaults={"first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
    "deepseek_v3": Architecture(
        family="deepseek",
        name="DeepseekV3ForCausalLM",
        read=families.read_deepseek_v3,
        write=families.write_deepseek_v3,
        defaults={
            "num_key_value_heads": 128,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
        },
    ),
    "qwen2": Architecture(
        family="qwen",
        name="Qwen2ForCausalLM",
        read=families.read_qwen2,
        write=families.write_qwen2,
        defaults={"num_key_value_heads": 32, "head_dim": None},
        derived=frozenset({"num_key_value_heads"}),
    ),
    "qwen3": Architecture(
        family="qwen",
        name="Qwen3ForCausalLM",
        read=families.read_qwen3,
        write=families.write_qwen3,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        derived=frozenset({"num_key_value_heads"}),
    ),
    "qwen3_moe": Architecture(
        family="qwen",
        name="Qwen3MoeForCausalLM",
        read=families.read_qwen3_moe,
        write=families.write_qwen3_moe,
        defaults={"num_key_value_heads": 4, "head_dim": None},
    ),
}
"""``model_type`` -> what it is."""


def options_of(document: Mapping[str, Any], *, prediction: bool = True) -> Options:
    """The model options that a ``config.json`` describes. Without ``prediction`` its layers of multi-token
    prediction are left out.

    Raises ``CheckpointError`` for an architecture that is not known, for entries that say something
    that a model here cannot do, and for those that its class in transformers reads and nothing here knows,
    unless they have the class's default.
    """
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json has the model_type {kind!r}; expected one of {', '.join(ARCHITECTURES)}. "
            "Weights of another architecture cannot be converted"
        )
    architecture = ARCHITECTURES[kind]
    reader = Reader(document, architecture.defaults)
    # swish is silu's other name.
    reader.require("hidden_act", "silu", "swish")
    reader.require("attention_bias", False)
    reader.require("mlp_bias", False)
    layers, heads = reader.integer("num_hidden_layers"), reader.integer("num_attention_heads")
    kinds = reader.get("layer_types", None)
    if kinds is not None and kinds != ["full_attention"] * layers:
        raise wrong_entry("layer_types", kinds, f"{layers} times 'full_attention'")
    hidden = reader.integer("hidden_size")
    found: Options = {
        "family": architecture.family,
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": reader.integer("intermediate_size"),
        "num_attention_heads": heads,
        "vocab_size": reader.integer("vocab_size"),
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "layernorm_epsilon": reader.number("rms_norm_eps"),
        "init_method_std": reader.number("initializer_range", 0.02),
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not reader.flag("tie_word_embeddings", False),
        "attention_dropout": reader.number("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        **rope_options(document, theta=architecture.defaults.get("rope_theta", 10000.0)),
        **architecture.read(reader),
    }
    if not found.get("multi_latent_attention"):
        for name in ("num_key_value_heads", "head_dim"):
            if document.get(name, 0) is None and name not in architecture.derived:
                raise wrong_entry(name, None, "a whole number")
        found["num_query_groups"] = reader.optional_integer("num_key_value_heads") or heads
        head = reader.optional_integer("head_dim")
        if head is None and kind == "mixtral" and found["rope_type"] == "yarn":
            # transformers takes null for the size and cannot build the model.
            raise wrong_entry("head_dim", None, f"a number with YaRN, such as {hidden // heads}")
        if head is None and hidden % heads:
            raise wrong_entry(
                "hidden_size", hidden, f"a multiple of num_attention_heads = {heads}, or head_dim"
            )
        found["kv_channels"] = head or hidden // heads
    if not prediction:
        found.pop("mtp_num_layers", None)
    _require_known(document, reader.known | ENTRIES | _OF_NO_EFFECT, architecture)
    return found


def _require_known(document: Mapping[str, Any], known: set[str], architecture: Architecture) -> None:
    """Raise ``CheckpointError`` for entries beside the ``known`` that the class in transformers reads, unless
    they say what it does without them."""
    release, fields = read_by_class(document["model_type"])
    wrong = [
        f"- {name} = {json.dumps(value)}; expected {json.dumps(fields[name])}, its default"
        for name, value in sorted(document.items())
        if name in fields and name not in known and not same(value, fields[name])
    ]
    if wrong:
        raise CheckpointError(
            f"config.json has entries that {architecture.name} of transformers {release} reads and a model "
            "here has not:\n" + "\n".join(wrong) + "\nIf the weights were trained without them, take them "
            "out; else these weights cannot be converted"
        )


def model_type_of(model: Any) -> str:
    """The ``model_type`` under which a ``ModelConfig`` is published. Raises ``ConfigError`` when there is
    none."""
    family = model.family
    if family in ("llama", "mixtral"):
        return str(family)
    if family == "deepseek":
        return "deepseek_v3" if model.moe_router_score_function == "sigmoid" else "deepseek_v2"
    if family == "qwen":
        if model.num_moe_experts is not None:
            return "qwen3_moe"
        return "qwen3" if model.qk_layernorm else "qwen2"
    raise ConfigError(f"the family {family} has no published form; expected llama, mixtral, deepseek or qwen")


def config_json(
    model: Any,
    *,
    dtype: str,
    like: Mapping[str, Any] | None = None,
    fp8_block: tuple[int, int] | None = None,
    in_bf16: Sequence[str] = (),
) -> dict[str, Any]:
    """``config.json`` for a ``ModelConfig``: what transformers, vLLM and SGLang read.

    ``dtype`` names the weights' type. Entries of ``like``, an earlier ``config.json`` of the same
    ``model_type``, that say nothing about the model are taken over. Raises ``ConfigError`` when the model
    cannot be published as its family's architecture, naming why.
    """
    kind = model_type_of(model)
    architecture = ARCHITECTURES[kind]
    document: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": model.vocab_size,
        **rope_settings(model),
    }
    families.require_published(model)
    document |= architecture.write(model)
    _require_same_model(document, model)
    kept = dict(like) if like and like.get("model_type") == kind else {}
    for name in _WRITTEN_ANEW:
        kept.pop(name, None)
    kept |= document
    _require_no_contradiction(kept, model)
    if fp8_block is not None:
        kept["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(fp8_block),
            # Modules of FP8 models that are not in FP8 here. A list replaces the reader's own, which has the
            # output layer, so it is named too.
            **({"modules_to_not_convert": [*in_bf16, "lm_head"]} if in_bf16 else {}),
        }
    return dict(sorted(kept.items()))


def _require_same_model(document: Mapping[str, Any], model: Any) -> None:
    """Raise ``ConfigError`` unless ``document`` says all of ``model`` that its output depends on."""
    ours = {name: getattr(model, name) for name, option in options().items() if option.section == "model"}
    found = [
        f"- {each.name} is {each.now}; expected {each.before}"
        for each in changes(options_of(document), ours)
        if each.kind in (Kind.SHAPE, Kind.FUNCTION)
    ]
    if found:
        raise ConfigError(
            f"the model has no form as {document['architectures'][0]}, which cannot say:\n" + "\n".join(found)
        )


def _require_no_contradiction(document: Mapping[str, Any], model: Any) -> None:
    """Raise ``ConfigError`` where an entry that was taken over says something else than the model."""
    try:
        _require_same_model(document, model)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(
            "the earlier config.json, of --hf-files or carried along, has an entry that contradicts the "
            f"model: {error}. Take that entry out of it, or give --hf-files of the model's own architecture"
        ) from error


_OF_NO_EFFECT = {
    "_attn_implementation",
    "_commit_hash",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "model_type",
    "eos_token_id",
    "experts_implementation",
    "id2label",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Entries that the classes read and that change no logit: tokens, kernels, dtypes, what a call returns."""

_WRITTEN_ANEW = (
    "auto_map",
    "dtype",
    "head_dim",
    "layer_types",
    "num_local_experts",
    "num_mtp_layers",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
    "transformers_weights",
)
"""Entries that would contradict what is written; code of a repository is none of an export's business."""
