"""Rotary settings of a ``config.json`` to our options and back: none, linear, llama3, yarn.

Files from before transformers 5 have ``rope_theta`` and ``rope_scaling``, newer ones ``rope_parameters``.
The older form is written: every reader knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_megatron.errors import CheckpointError, ConfigError

_TYPES = {"default": "rope", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_NUMBERS = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_OF_TYPE = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ),
}
_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}


def rope_options(document: Mapping[str, Any]) -> dict[str, Any]:
    """The options for the rotary positions of a ``config.json``. Raises ``CheckpointError`` for a kind or an
    entry that is not known."""
    settings = dict(document.get("rope_parameters") or document.get("rope_scaling") or {})
    theta = settings.pop("rope_theta", document.get("rope_theta", 10000.0))
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    partial = settings.pop("partial_rotary_factor", document.get("partial_rotary_factor", 1.0))
    if kind not in _TYPES:
        raise CheckpointError(
            f"config.json has rotary positions of the kind {kind!r}; expected one of {', '.join(_TYPES)}"
        )
    options: dict[str, Any] = {
        "rotary_base": float(theta),
        "rotary_percent": float(partial),
        "rope_type": _TYPES[kind],
    }
    known = _OF_TYPE.get(kind, ())
    unknown = sorted(name for name, value in settings.items() if name not in known and value is not None)
    if unknown:
        raise CheckpointError(
            f"config.json has {kind} rotary positions with {', '.join(unknown)}, which are not understood; "
            f"expected {', '.join(known) or 'nothing more'}"
        )
    if kind == "yarn":
        settings = _DEFAULTS | settings | _factors(settings)
    for name in known:
        value = settings.get(name)
        if value is None and name == "original_max_position_embeddings":
            value = document.get("max_position_embeddings")
        if value is None:
            raise CheckpointError(f"config.json has {kind} rotary positions without {name}")
        number = int(value) if name == "original_max_position_embeddings" else float(value)
        options[_NUMBERS[name]] = number
    return options


def _factors(settings: Mapping[str, Any]) -> dict[str, float]:
    """Without both factors transformers takes 0.1 ln(factor) + 1, which is what these say."""
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return {}
    if settings.get("mscale_all_dim"):
        raise CheckpointError("config.json has mscale_all_dim without mscale, which readers take differently")
    return {"mscale": 1.0, "mscale_all_dim": 0.0}


def rope_settings(model: Any) -> dict[str, Any]:
    """The entries of ``config.json`` for the rotary positions of a ``ModelConfig``."""
    found: dict[str, Any] = {"rope_theta": _whole(model.rotary_base)}
    if model.rotary_percent != 1.0:
        found["partial_rotary_factor"] = model.rotary_percent
    kind = model.rope_type
    if kind == "rope":
        found["rope_scaling"] = None
        return found
    settings = {name: getattr(model, _NUMBERS[name]) for name in _OF_TYPE[kind]}
    if not settings.get("mscale_all_dim", 1.0):
        if settings.pop("mscale") != 1.0:
            raise ConfigError("mscale other than 1 without mscale_all_dim has no published form")
        settings.pop("mscale_all_dim")
    # Older readers know the kind as "type".
    found["rope_scaling"] = {"rope_type": kind, "type": kind, **settings}
    return found


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
