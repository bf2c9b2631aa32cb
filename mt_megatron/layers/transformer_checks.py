"""Checks of the added fields of ``TransformerConfig``, on plain values.

``TransformerConfig`` itself and the trainer's validation ask the same function. Imports neither torch
nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from mt_megatron.layers.mtp.checks import prediction_problems

from ..errors import ConfigError
from .transformer_fields import FIELDS, LOAD_BALANCING, ROPE_TYPES_OF, moe_pattern

Values = Mapping[str, Any]

_DEFAULTS = {one.name: one.default for one in FIELDS}
_POSITIVE = (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk_scaling_factor",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rotary_base",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "rope_high_freq_factor",
    "mtp_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
_NOT_NEGATIVE = ("moe_router_bias_update_rate", "mtp_loss_scaling_factor", "rope_low_freq_factor")
_CHOICES = ("moe_router_score_function", "moe_router_dtype", "rope_type")
_NEED_EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_topk_scaling_factor",
)

_NOT_SINKHORN = (
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_group_score_topk",
    "moe_router_topk_scaling_factor",
)


def field_problems(values: Values) -> list[str]:
    """One line per problem: found, expected, what to change.

    ``values`` holds the added fields and Megatron-Core's own by name; those that are absent count as
    unset.
    """
    found = _single(values)
    return found or [
        *_experts(values),
        *_router(values),
        *_attention(values),
        *_rotary(values),
        *_stages(values),
        *prediction_problems(values),
    ]


def check_fields(values: Values) -> None:
    """Raises ``ConfigError`` with everything that ``field_problems`` finds."""
    found = field_problems(values)
    if found:
        raise ConfigError("TransformerConfig: " + "; ".join(found))


def check_read(values: Values, is_in_force: Callable[[str], bool]) -> None:
    """Raises ``ConfigError`` for fields that are set and that nobody reads, since the patches of the
    feature that does are not in force: the model would be another one."""
    found = []
    for one in FIELDS:
        if _get(values, one.name) == one.default:
            continue
        if one.features == ("rope",) and _get(values, "multi_latent_attention"):
            # It computes angles of its own, and refuses those of a model that knows neither.
            continue
        absent = [name for name in one.features if not is_in_force(name)]
        if absent:
            names = " and ".join(absent)
            found.append(
                f"{one.name} is {_get(values, one.name)!r} and would be ignored; expected {names} among the "
                f"features of patch(). Add {', '.join(absent)} or leave {one.name} out."
            )
    if found:
        raise ConfigError("TransformerConfig: " + "; ".join(found))


def _get(values: Values, name: str) -> Any:
    return values.get(name, _DEFAULTS.get(name))


def _single(values: Values) -> list[str]:
    found = []
    for name in _POSITIVE:
        value = _get(values, name)
        if value is not None and not _number(value, above=0):
            found.append(f"{name} is {value!r}; expected more than 0. Change {name}.")
    for name in _NOT_NEGATIVE:
        value = _get(values, name)
        if not _number(value, above=-1) or value < 0:
            found.append(f"{name} is {value!r}; expected at least 0. Change {name}.")
    for name in _CHOICES:
        value = _get(values, name)
        choices = _choices(name)
        if value not in choices:
            words = ", ".join("none" if choice is None else str(choice) for choice in choices)
            found.append(f"{name} is {value!r}; expected one of {words}. Change {name}.")
    balancing = values.get("moe_router_load_balancing_type", "none")
    if balancing not in LOAD_BALANCING:
        words = ", ".join(LOAD_BALANCING)
        found.append(
            f"moe_router_load_balancing_type is {balancing!r}; expected one of {words}. Change "
            "moe_router_load_balancing_type."
        )
    return found


def _number(value: object, *, above: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > above


def _choices(name: str) -> list[Any]:
    annotation = next(one.type for one in FIELDS if one.name == name)
    nested = [get_args(member) or (None,) for member in get_args(annotation) if not isinstance(member, str)]
    return [*(member for group in nested for member in group)] or list(get_args(annotation))


def _experts(values: Values) -> list[str]:
    experts = values.get("num_moe_experts")
    if experts is None:
        return [
            f"{name} is {_get(values, name)!r} without experts; expected num_moe_experts with it. Set "
            f"num_moe_experts or leave {name} out."
            for name in _NEED_EXPERTS
            if _get(values, name) != _DEFAULTS[name]
        ]
    found: list[str] = []
    try:
        pattern = moe_pattern(_get(values, "moe_layer_freq"), int(values.get("num_layers") or 0))
    except ConfigError as error:
        found.append(str(error))
    else:
        if pattern and not any(pattern):
            found.append(
                f"moe_layer_freq leaves no layer for the {experts} experts; expected a 1 in it. Change "
                "moe_layer_freq or leave num_moe_experts out."
            )
    found += _divides(values, experts)
    shared = _get(values, "moe_shared_expert_intermediate_size")
    if _get(values, "moe_shared_expert_overlap"):
        if shared is None:
            found.append(
                "moe_shared_expert_overlap is on without a shared expert; expected "
                "moe_shared_expert_intermediate_size with it. Set that or leave moe_shared_expert_overlap "
                "out."
            )
        elif values.get("moe_token_dispatcher_type") != "alltoall":
            found.append(
                "moe_shared_expert_overlap is on with the "
                f"{values.get('moe_token_dispatcher_type')} dispatcher; expected alltoall. Set "
                "moe_token_dispatcher_type to alltoall."
            )
    if values.get("moe_extended_tp"):
        found += [
            f"moe_extended_tp is on with {name} = {_get(values, name)!r}; expected one of the two. Leave "
            "moe_extended_tp out."
            for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
            if _get(values, name) is not None
        ]
    return found


def _divides(values: Values, experts: int) -> list[str]:
    found = []
    ep = values.get("expert_model_parallel_size") or 1
    if experts % ep and not values.get("moe_extended_tp"):
        found.append(
            f"num_moe_experts is {experts}; expected a multiple of expert_model_parallel_size = {ep}. Change "
            "num_moe_experts or expert_model_parallel_size."
        )
    tp = values.get("tensor_model_parallel_size") or 1
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        size = _get(values, name)
        if size is not None and size % tp:
            found.append(
                f"{name} is {size}; expected a multiple of tensor_model_parallel_size = {tp}. Change "
                f"{name} or tensor_model_parallel_size."
            )
    return found


def _router(values: Values) -> list[str]:
    experts = values.get("num_moe_experts")
    if experts is None:
        return []
    found = []
    sigmoid = _get(values, "moe_router_score_function") == "sigmoid"
    if _get(values, "moe_router_enable_expert_bias") and not sigmoid:
        found.append(
            "moe_router_enable_expert_bias is on with softmax scores; expected sigmoid. Set "
            "moe_router_score_function to sigmoid."
        )
    if sigmoid and values.get("moe_router_load_balancing_type") == "sinkhorn":
        found.append(
            "moe_router_load_balancing_type is sinkhorn with sigmoid scores; expected aux_loss, seq_aux_loss "
            "or none. Change moe_router_load_balancing_type."
        )
    if values.get("moe_router_load_balancing_type") == "sinkhorn":
        unread = [name for name in _NOT_SINKHORN if _get(values, name) != _DEFAULTS[name]]
        if unread:
            said = ", ".join(f"{name} {_get(values, name)!r}" for name in unread)
            found.append(
                f"found {said} with sinkhorn balancing, which does not read it; expected no such option. "
                f"Leave {', '.join(unread)} out, or set moe_router_load_balancing_type to aux_loss, "
                "seq_aux_loss or none."
            )
        return found
    return found + _groups(values, experts, int(values.get("moe_router_topk") or 1))


def _groups(values: Values, experts: int, topk: int) -> list[str]:
    groups, chosen = _get(values, "moe_router_num_groups"), _get(values, "moe_router_group_topk")
    if groups is None and chosen is None:
        if (judges := _get(values, "moe_router_group_score_topk")) is None:
            return []
        return [
            f"moe_router_group_score_topk is {judges} without groups; expected moe_router_num_groups and "
            "moe_router_group_topk with it. Set both or leave moe_router_group_score_topk out."
        ]
    if groups is None or chosen is None:
        there, absent = ("moe_router_group_topk", "moe_router_num_groups")
        if chosen is None:
            there, absent = absent, there
        return [
            f"{there} is set without {absent}; expected both or neither. Set {absent} or leave {there} out."
        ]
    if groups < 1 or experts % groups:
        return [
            f"moe_router_num_groups is {groups}; expected a divisor of num_moe_experts = {experts}. Change "
            "moe_router_num_groups."
        ]
    if not 1 <= chosen <= groups:
        return [
            f"moe_router_group_topk is {chosen}; expected 1 to moe_router_num_groups = {groups}. Change "
            "moe_router_group_topk."
        ]
    found = []
    judges = _get(values, "moe_router_group_score_topk")
    if judges is not None and not 1 <= judges <= experts // groups:
        found.append(
            f"moe_router_group_score_topk is {judges}; expected 1 to the {experts // groups} experts of a "
            "group. Change moe_router_group_score_topk."
        )
    if judges is None and topk % chosen:
        found.append(
            f"moe_router_topk is {topk}; expected a multiple of moe_router_group_topk = {chosen}, since a "
            "group is judged by its topk/group_topk best experts. Change moe_router_topk, or set "
            "moe_router_group_score_topk."
        )
    if topk > chosen * (experts // groups):
        found.append(
            f"moe_router_topk is {topk}, and {chosen} groups of {experts // groups} experts hold fewer; "
            "expected at most as many. Raise moe_router_group_topk or lower moe_router_topk."
        )
    return found


def _attention(values: Values) -> list[str]:
    if not _get(values, "multi_latent_attention"):
        if _get(values, "recompute_mla_up_proj"):
            return [
                "recompute_mla_up_proj is on without multi-latent attention; expected multi_latent_attention "
                "with it. Leave recompute_mla_up_proj out."
            ]
        return []
    found = []
    heads, groups = values.get("num_attention_heads"), values.get("num_query_groups")
    if groups is not None and groups != heads:
        found.append(
            f"num_query_groups is {groups} with multi-latent attention; expected none: every one of the "
            f"{heads} heads has keys and values of its own. Leave num_query_groups out."
        )
    rotated = _get(values, "qk_pos_emb_head_dim")
    if rotated % 2:
        found.append(
            f"qk_pos_emb_head_dim is {rotated}; expected an even number. Change qk_pos_emb_head_dim."
        )
    if values.get("rotary_interleaved"):
        found.append(
            "rotary_interleaved is on with multi-latent attention, which has an order of its own; expected "
            "off. Leave rotary_interleaved out."
        )
    return found


def _rotary(values: Values) -> list[str]:
    kind = _get(values, "rope_type")
    low, high = _get(values, "rope_low_freq_factor"), _get(values, "rope_high_freq_factor")
    if kind == "llama3" and low >= high:
        return [
            f"rope_low_freq_factor is {low} and rope_high_freq_factor {high}; expected the first below the "
            "second. Change rope_low_freq_factor."
        ]
    found = []
    for name, kinds in ROPE_TYPES_OF.items():
        if kind not in kinds and _get(values, name) != _DEFAULTS[name]:
            found.append(
                f"{name} is {_get(values, name)} with rope_type {kind}, which does not read it; expected "
                f"{_DEFAULTS[name]}. Set rope_type to {' or '.join(kinds)}, or leave {name} out."
            )
    return found


def _stages(values: Values) -> list[str]:
    found = []
    for end in ("first", "last"):
        new, old = f"num_layers_in_{end}_pipeline_stage", f"{end}_pipeline_num_layers"
        ours, theirs = _get(values, new), values.get(old)
        if ours is not None and theirs is not None and ours != theirs:
            found.append(
                f"{new} is {ours} and {old} is {theirs}; expected one number, since both mean the same. "
                "Leave one of them out."
            )
        if _get(values, "pipeline_model_parallel_layout") is not None and (ours or theirs):
            name = new if ours else old
            found.append(
                f"{name} is set beside pipeline_model_parallel_layout, which says everything; expected one "
                f"of the two. Leave {name} out."
            )
    return found
