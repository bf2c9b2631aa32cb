"""Unsupported combinations with multi-token prediction, on plain values. Imports no torch and no Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_megatron.errors import ConfigError


def prediction_problems(values: Mapping[str, Any]) -> list[str]:
    """One line per problem: found, expected, what to change. Nothing without ``mtp_num_layers``."""
    depths = values.get("mtp_num_layers")
    if not depths:
        return []
    found = []
    context = values.get("context_parallel_size") or 1
    if context > 1:
        found.append(
            f"mtp_num_layers is {depths} with context_parallel_size = {context}; expected 1: a "
            "depth needs the next tokens of a sequence, which another process holds. Change one of them."
        )
    for name, why in (
        ("fp8", "the depths run outside of the block that computes in it"),
        ("defer_embedding_wgrad_compute", "the output layer is used once for every depth"),
        ("enable_cuda_graph", "the depths are not captured"),
    ):
        if values.get(name) and not (name == "fp8" and values.get("fp8_recipe")):
            found.append(
                f"mtp_num_layers is {depths} with {name} = {values[name]}; expected it unset: {why}. Change "
                "one of them."
            )
    return found


def check_prediction(config: Any) -> None:
    """Raises ``ConfigError`` with everything that is wrong with a ``TransformerConfig`` here."""
    found = prediction_problems(vars(config))
    if found:
        raise ConfigError("; ".join(found))
