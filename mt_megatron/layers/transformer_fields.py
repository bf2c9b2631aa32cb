"""Fields added to ``TransformerConfig``: the list that patches, options and documents read.

Names and meanings are Megatron-Core 0.12's, so that configurations and checkpoints can move to it.
Left unset, every field means what Megatron-Core 0.9.0 does without it. Imports neither torch nor
Megatron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AddedField:
    """One field."""

    name: str
    """The attribute's name."""

    type: Any
    """The Python type of its values."""

    default: Any
    """The value that changes nothing."""

    doc: str
    """What it means, on one line."""

    features: tuple[str, ...] = ()
    """Without whose patches it would be ignored. None where another field switches on what it describes."""


_READ_BY = {
    # Layers get their attention where those of a mixture get their experts.
    "multi_latent_attention": ("mla", "moe"),
    "rope_type": ("rope",),
    "rotary_base": ("rope",),
    "mtp_num_layers": ("mtp",),
    "fp8_recipe": ("fp8", "linear"),
}


def _fields(*rows: tuple[str, Any, Any, str], feature: str | None = None) -> tuple[AddedField, ...]:
    of_all = () if feature is None else (feature,)
    return tuple(
        AddedField(name=name, type=kind, default=default, doc=doc, features=_READ_BY.get(name, of_all))
        for name, kind, default, doc in rows
    )


_EXPERTS = _fields(
    (
        "moe_ffn_hidden_size",
        int | None,
        None,
        "Width of each expert between its two products. None: ffn_hidden_size, as that of dense layers.",
    ),
    (
        "moe_layer_freq",
        int | list[int],
        1,
        "Which layers have experts: N means layers 0, N, 2N ..., a list of num_layers entries says 1 "
        "(experts) or 0 (dense) for each.",
    ),
    (
        "moe_shared_expert_intermediate_size",
        int | None,
        None,
        "Width of the expert that every token passes, beside those it is routed to; several shared experts "
        "are one of their summed width. None: no such expert.",
    ),
    (
        "moe_shared_expert_overlap",
        bool,
        False,
        "Whether the shared expert computes on a stream of its own, beside the exchange of tokens.",
    ),
    feature="moe",
)

_ROUTER = _fields(
    (
        "moe_router_score_function",
        Literal["softmax", "sigmoid"],
        "softmax",
        "What turns the router's logits into scores.",
    ),
    (
        "moe_router_enable_expert_bias",
        bool,
        False,
        "Whether a bias per expert, moved after every step towards an even load, takes part in the choice of "
        "experts (arXiv:2408.15664). Needs sigmoid scores.",
    ),
    ("moe_router_bias_update_rate", float, 1e-3, "How far that bias moves per step."),
    (
        "moe_router_num_groups",
        int | None,
        None,
        "Experts are divided into so many groups of neighbours, of which a token may use some. None: no "
        "groups.",
    ),
    ("moe_router_group_topk", int | None, None, "How many of those groups a token may use."),
    (
        "moe_router_group_score_topk",
        int | None,
        None,
        "So many of a group's best scores, added up, judge it: 1 as published for DeepSeek-V2, 2 for V3. "
        "None: moe_router_topk / moe_router_group_topk, as in Megatron-Core 0.12, which has no such field.",
    ),
    (
        "moe_router_topk_scaling_factor",
        float | None,
        None,
        "The chosen experts' weights are multiplied by it. None: they are not.",
    ),
    (
        "moe_router_dtype",
        Literal["fp32", "fp64"] | None,
        None,
        "Type in which the router computes its logits and scores. None: the parameters' type.",
    ),
    feature="moe",
)

_ATTENTION = _fields(
    (
        "multi_latent_attention",
        bool,
        False,
        "Whether attention keeps keys and values in a small latent vector (arXiv:2405.04434, section 2.1).",
    ),
    (
        "q_lora_rank",
        int | None,
        None,
        "Rank of the queries' down-projection. None: queries are not compressed.",
    ),
    ("kv_lora_rank", int, 512, "Rank of the joint down-projection of keys and values."),
    ("qk_head_dim", int, 128, "Dimensions of a head's query and key that carry no position."),
    ("qk_pos_emb_head_dim", int, 64, "Dimensions of a head's query and key that are rotated."),
    ("v_head_dim", int, 128, "Dimensions of a head's value."),
    (
        "recompute_mla_up_proj",
        bool,
        False,
        "Whether the up-projections of multi-latent attention are computed again in backward.",
    ),
)

_ROTARY = _fields(
    (
        "rope_type",
        Literal["rope", "linear", "llama3", "yarn"],
        "rope",
        "How rotary frequencies are stretched for longer sequences: not at all, linearly, as in Llama 3.1, "
        "or by YaRN (arXiv:2309.00071).",
    ),
    (
        "rotary_base",
        float | None,
        None,
        "Theta of multi-latent attention's rotary positions; for other attention it is GPTModel's argument.",
    ),
    ("rotary_scaling_factor", float, 1.0, "How many times longer than the original the sequences may be."),
    (
        "original_max_position_embeddings",
        int,
        4096,
        "Longest sequence of the model before its positions were stretched.",
    ),
    ("beta_fast", float, 32.0, "YaRN: rotations over the original length from which a frequency is kept."),
    (
        "beta_slow",
        float,
        1.0,
        "YaRN: rotations over the original length below which a frequency is stretched.",
    ),
    ("mscale", float, 1.0, "YaRN: weight of the logarithm in the factor of rotated queries and keys."),
    ("mscale_all_dim", float, 0.0, "YaRN: the same for all dimensions, as a factor of the softmax."),
    ("rope_low_freq_factor", float, 1.0, "Llama 3.1: rotations below which a frequency is stretched."),
    ("rope_high_freq_factor", float, 4.0, "Llama 3.1: rotations from which a frequency is kept."),
)

_STRETCHED = ("linear", "llama3", "yarn")
ROPE_TYPES_OF: Mapping[str, tuple[str, ...]] = {
    "rotary_scaling_factor": _STRETCHED,
    "original_max_position_embeddings": ("llama3", "yarn"),
    "rope_low_freq_factor": ("llama3",),
    "rope_high_freq_factor": ("llama3",),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), ("yarn",)),
}
"""Number of rotary positions -> the values of ``rope_type`` that read it."""

_PREDICTION = _fields(
    (
        "mtp_num_layers",
        int | None,
        None,
        "Multi-token prediction: how many further tokens are predicted, each by a layer of its own "
        "(arXiv:2412.19437, section 2.2). None: none.",
    ),
    (
        "mtp_loss_scaling_factor",
        float,
        0.1,
        "Weight of the mean of their losses beside the loss of the next token.",
    ),
)

_PIPELINE = _fields(
    (
        "num_layers_in_first_pipeline_stage",
        int | None,
        None,
        "Layers of the first stage; another name of first_pipeline_num_layers. None: as many as the others.",
    ),
    (
        "num_layers_in_last_pipeline_stage",
        int | None,
        None,
        "Layers of the last stage; another name of last_pipeline_num_layers. None: as many as the others.",
    ),
    (
        "pipeline_model_parallel_layout",
        str | list[int] | None,
        None,
        "Layers of every stage (and chunk, in the order tokens pass them): their counts, or a text of E, t, "
        "m, L and | such as 'Et*3|t*4|t*3L'. None: the same number everywhere.",
    ),
)

_FP8 = _fields(
    (
        "fp8_recipe",
        str | None,
        None,
        "How the linears of decoder layers compute in FP8: a preset of mt_megatron.fp8.recipe (delayed, "
        "tensorwise, rowwise, rowwise_gw_hp, blockwise, mxfp8, nvfp4). None: not at all.",
    ),
    (
        "fp8_recipe_format",
        Literal["e4m3", "hybrid"] | None,
        None,
        "Formats of a recipe with one scale per tensor: gradients in e5m2 (hybrid) or not. Upstream's fp8 "
        "(--fp8-format) sets it where a recipe computes. None: the recipe's own.",
    ),
    (
        "fp8_backend",
        Literal["auto", "reference", "scaled_mm", "deep_gemm"],
        "auto",
        "What computes the products of a recipe: torch._scaled_mm on devices and the reference, an exact "
        "emulation, on the CPU (auto), or one of them by name. deep_gemm: blockwise by DeepGEMM, if it is "
        "installed.",
    ),
    (
        "first_last_layers_bf16",
        bool,
        True,
        "Whether the first and the last layers stay in bf16 under an FP8 recipe. Megatron-Core 0.12 has "
        "False by default.",
    ),
    ("num_layers_at_start_in_bf16", int, 1, "How many of the first layers then stay in bf16."),
    ("num_layers_at_end_in_bf16", int, 1, "How many of the last layers then stay in bf16."),
    (
        "fp8_output_layer",
        bool,
        False,
        "Whether the output layer computes in FP8 too. The loss is sensitive to its logits.",
    ),
    (
        "fp8_save_activations",
        bool,
        False,
        "Whether inputs are kept for backward in FP8 also under recipes that cast them anew for the weight "
        "gradient. Recipes with one scale per tensor always do.",
    ),
    (
        "fp8_telemetry_interval",
        int,
        0,
        "In every so many steps what the casts lose is measured and recorded. 0: never.",
    ),
    (
        "fp8_demote_underflow",
        float | None,
        None,
        "A linear falls back to bf16 where a larger share of an operand underflows to zero. None: never.",
    ),
    (
        "fp8_demote_saturation",
        float | None,
        None,
        "A linear falls back to bf16 where a larger share of an operand is beyond the range. None: never.",
    ),
    (
        "fp8_demote_snr",
        float | None,
        None,
        "A linear falls back to bf16 where an operand's median SNR is below so many dB. None: never.",
    ),
)

FIELDS: tuple[AddedField, ...] = (
    *_EXPERTS,
    *_ROUTER,
    *_ATTENTION,
    *_ROTARY,
    *_PREDICTION,
    *_PIPELINE,
    *_FP8,
)
"""In the order in which documents show them."""

LOAD_BALANCING: tuple[str, ...] = ("aux_loss", "seq_aux_loss", "sinkhorn", "none")
"""Values of upstream's ``moe_router_load_balancing_type``; ``seq_aux_loss`` is added."""


def dataclass_fields() -> tuple[dataclasses.Field[Any], ...]:
    """``FIELDS`` as keyword-only fields of a dataclass, so that positions of others stay as they are."""
    rows = [
        (one.name, one.type, dataclasses.field(default=one.default, kw_only=True, metadata={"doc": one.doc}))
        for one in FIELDS
    ]
    made = dataclasses.make_dataclass("TransformerFields", rows, init=False, repr=False, eq=False)
    return dataclasses.fields(made)


def moe_pattern(freq: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """1 for every layer with experts and 0 for every dense one, ``num_layers`` long.

    Raises ``ConfigError`` for a list of another length or with other entries, and for ``freq`` < 1.
    """
    if isinstance(freq, bool) or not isinstance(freq, int | Sequence) or isinstance(freq, str):
        raise ConfigError(
            f"moe_layer_freq is {freq!r}; expected a whole number, or a list of 0 and 1 with one entry per "
            "layer. Change moe_layer_freq."
        )
    if isinstance(freq, int):
        if freq < 1:
            raise ConfigError(f"moe_layer_freq is {freq}; expected at least 1. Change moe_layer_freq.")
        return tuple(int(layer % freq == 0) for layer in range(num_layers))
    if len(freq) != num_layers:
        raise ConfigError(
            f"moe_layer_freq has {len(freq)} entries; expected one per layer = {num_layers}. Change "
            "moe_layer_freq or num_layers."
        )
    wrong = [entry for entry in freq if entry not in (0, 1)]
    if wrong:
        raise ConfigError(
            f"moe_layer_freq holds {wrong[0]!r}; expected 0 (dense) and 1 (experts) only. Change "
            "moe_layer_freq."
        )
    return tuple(int(entry) for entry in freq)


def moe_layer_pattern(config: Any) -> tuple[int, ...]:
    """``moe_pattern`` of a ``TransformerConfig``; all 0 without experts."""
    if config.num_moe_experts is None:
        return (0,) * int(config.num_layers)
    return moe_pattern(config.moe_layer_freq, int(config.num_layers))
