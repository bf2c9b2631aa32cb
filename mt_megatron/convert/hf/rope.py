"""Rotary settings of a ``config.json`` to our options and back: none, linear, llama3, yarn.

Files from before transformers 5 have ``rope_theta`` and ``rope_scaling``, newer ones ``rope_parameters``.
The older form is written: every reader knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_megatron.convert.hf.config_entries import is_number, wrong_entry
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
_SAY_NOTHING = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}

ENTRIES = {
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
}
"""Entries of ``config.json`` that are read here."""


def rope_options(document: Mapping[str, Any], *, theta: float) -> dict[str, Any]:
    """The options for the rotary positions of a ``config.json``, resolved as transformers 5 does;
    ``theta`` is the architecture's default.

    ``rope_scaling`` goes before ``rope_parameters``, ``rope_type`` before ``type``, and entries of either
    before those beside them. Raises ``CheckpointError`` for a kind or an entry that is not known.
    """
    settings = document.get("rope_scaling") or document.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise wrong_entry("rope_parameters", settings, "an object")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _TYPES:
        raise CheckpointError(
            f"config.json has rotary positions of the kind {kind!r}; expected one of {', '.join(_TYPES)}. "
            "Weights of another kind cannot be converted"
        )
    beside = {name: document[name] for name in ("rope_theta", "partial_rotary_factor") if name in document}
    base = _positive("rope_theta", {"rope_theta": theta, **beside, **settings}["rope_theta"])
    partial = {**beside, **settings}.get("partial_rotary_factor")
    if partial is not None and partial != 1:
        raise wrong_entry(
            "partial_rotary_factor", partial, "none or 1: the readers of this architecture rotate whole heads"
        )
    known = _OF_TYPE.get(kind, ())
    unknown = sorted(
        name
        for name, value in settings.items()
        if name not in known
        and name not in _SAY_NOTHING
        and value is not None
        # What YaRN does without the entry.
        and not (kind == "yarn" and name == "truncate" and value is True)
    )
    if unknown:
        raise CheckpointError(
            f"config.json has {kind} rotary positions with {', '.join(unknown)}, which are not understood; "
            f"expected {', '.join(known) or 'nothing more'}. Remove what has no effect on the model"
        )
    return {
        "rotary_base": base,
        "rotary_percent": 1.0,
        "rope_type": _TYPES[kind],
        **_of_kind(kind, dict(settings), document),
    }


def _of_kind(kind: str, settings: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    known = _OF_TYPE.get(kind, ())
    if kind == "yarn":
        for name, value in _DEFAULTS.items():
            settings[name] = settings.get(name) or value
        settings |= _factors(settings)
    longest = "original_max_position_embeddings"
    if longest in known:
        settings.setdefault(longest, document.get("max_position_embeddings"))
        if document.get(longest, settings[longest]) != settings[longest]:
            raise wrong_entry(
                longest, document[longest], f"{settings[longest]!r}, as among the rotary settings"
            )
    options: dict[str, Any] = {}
    for name in known:
        if name not in settings:
            raise CheckpointError(f"config.json has {kind} rotary positions without {name}. Add it to them")
        number = _positive(name, settings[name], zero=name.startswith("mscale"))
        if name == longest and not number.is_integer():
            raise wrong_entry(name, settings[name], "a whole number")
        options[_NUMBERS[name]] = int(number) if name == longest else number
    if settings.get("factor", 1) < 1:
        raise wrong_entry("factor", settings["factor"], "at least 1")
    if kind == "llama3" and settings["high_freq_factor"] <= settings["low_freq_factor"]:
        raise wrong_entry("high_freq_factor", settings["high_freq_factor"], "more than low_freq_factor")
    return options


def _positive(name: str, value: Any, *, zero: bool = False) -> float:
    if not is_number(value) or value < 0 or (value == 0 and not zero):
        raise wrong_entry(name, value, "a number of at least 0" if zero else "a number above 0")
    return float(value)


def _factors(settings: Mapping[str, Any]) -> dict[str, float]:
    """Without both factors transformers takes 0.1 ln(factor) + 1, which is what these say."""
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return {}
    if settings.get("mscale_all_dim"):
        raise CheckpointError(
            "config.json has mscale_all_dim without mscale, which readers take differently. Give both"
        )
    return {"mscale": 1.0, "mscale_all_dim": 0.0}


def rope_settings(model: Any) -> dict[str, Any]:
    """The entries of ``config.json`` for the rotary positions of a ``ModelConfig``."""
    found: dict[str, Any] = {"rope_theta": _whole(model.rotary_base)}
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
