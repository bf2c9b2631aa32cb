"""The model family that a configuration names."""

from __future__ import annotations

import importlib

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.seams import family as families
from mt_megatron.seams.family import ModelFamily

_BUILT_IN = ("llama", "mixtral", "deepseek", "qwen", "bert")
"""Families with a module of their name in ``mt_megatron.models``."""


def family_of(config: TrainingConfig) -> ModelFamily:
    """The configured model family. Raises ``ConfigError`` when it is not known."""
    name = config.model.family
    if name in _BUILT_IN:
        importlib.import_module(f"mt_megatron.models.{name}")
    return families.get(name)
