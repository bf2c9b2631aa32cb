"""Checks of the FP8 fields of ``TransformerConfig``, on plain values. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.fp8.kernels import CHOICES
from mt_megatron.fp8.recipe import PRESETS, recipe_of
from mt_megatron.near_names import hint

_DELAYED = {"fp8_margin": 0, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"}
_SHARES = ("fp8_demote_underflow", "fp8_demote_saturation")
_UPSTREAMS = ("te", "transformer_engine")
"""Names for what upstream chooses otherwise."""

_COUNTS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_telemetry_interval")


def fp8_problems(values: Mapping[str, Any]) -> list[str]:
    """One line per problem: found, expected, what to change."""
    found = []
    for name in _COUNTS:
        value = values.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            found.append(f"{name} is {value!r}; expected a whole number, at least 0. Change {name}.")
    for name in _SHARES:
        value = values.get(name)
        if value is not None and not 0 <= value <= 1:
            found.append(f"{name} is {value!r}; expected a share in [0, 1]. Change {name}.")
    recipe = values.get("fp8_recipe")
    if recipe is None and values.get("fp8") is not None:
        recipe = "delayed"
    demotes = [name for name in (*_SHARES, "fp8_demote_snr") if values.get(name) is not None]
    if demotes and not values.get("fp8_telemetry_interval"):
        found.append(
            f"{demotes[0]} is {values[demotes[0]]} and nothing is measured; expected fp8_telemetry_interval "
            f"above 0 with it. Set fp8_telemetry_interval or leave {demotes[0]} out."
        )
    backend = values.get("fp8_backend", "auto")
    if backend in _UPSTREAMS:
        found.append(
            f"fp8_backend is {backend!r}; expected one of {', '.join(CHOICES)}. Transformer Engine computes "
            "in modules of its own, not product by product: set transformer_impl transformer_engine with fp8 "
            "(--fp8-format) where it is installed and leave fp8_recipe and fp8_backend out."
        )
    elif backend not in CHOICES:
        found.append(
            f"fp8_backend is {backend!r}; expected one of {', '.join(CHOICES)}."
            f"{hint(str(backend), list(CHOICES))} Change fp8_backend."
        )
    elif backend != "auto" and recipe is None:
        found.append(
            f"fp8_backend {backend} without fp8_recipe; expected a recipe with it. Set fp8_recipe or leave "
            "fp8_backend out. Transformer Engine's own FP8 is transformer_impl transformer_engine with fp8."
        )
    if recipe is None:
        if values.get("fp8_output_layer"):
            found.append(
                "fp8_output_layer without fp8_recipe; expected a recipe with it. Set fp8_recipe or leave "
                "fp8_output_layer out."
            )
        return found
    if recipe not in PRESETS:
        return [
            *found,
            f"fp8_recipe is {recipe!r}; expected one of {', '.join(PRESETS)}."
            f"{hint(str(recipe), list(PRESETS))} Change fp8_recipe.",
        ]
    if values.get("fp16"):
        found.append(
            f"fp8_recipe {recipe} with fp16, whose loss scaling and range are not FP8's; expected bf16 with "
            "it. Set bf16 instead of fp16 or leave fp8_recipe out."
        )
    if values.get("fp8_output_layer") and values.get("defer_embedding_wgrad_compute"):
        found.append(
            "fp8_output_layer with defer_embedding_wgrad_compute, whose late weight gradients are computed "
            "in bf16; expected one of the two. Leave one of them out."
        )
    given = {name: values[name] for name, default in _DELAYED.items() if values.get(name, default) != default}
    try:
        recipe_of(
            recipe,
            format=values.get("fp8") or values.get("fp8_recipe_format"),
            margin=given.get("fp8_margin"),
            history=given.get("fp8_amax_history_len"),
            algorithm=given.get("fp8_amax_compute_algo"),
            amax_group="tp-cp" if values.get("tp_only_amax_red") else None,
            wgrad=values.get("fp8_wgrad", True),
        )
    except ConfigError as error:
        found.append(str(error))
    return found
