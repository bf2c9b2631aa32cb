"""``MLATransformerConfig``: Megatron-Core 0.12's configuration of multi-latent attention and its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.layers.transformer_fields import FIELDS, ROPE_TYPES_OF

_NAMES = ("megatron.core.transformer.transformer_config", "MLATransformerConfig")


@cache
def mla_transformer_config() -> type:
    """The class, under the name by which pickle finds it in later versions too.

    Call it after ``mt_megatron.patch``: it gives other defaults to fields that are added there.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclass
    class MLATransformerConfig(TransformerConfig):  # type: ignore[misc]
        """``TransformerConfig`` with multi-latent attention on, stretched by YaRN as in DeepSeek."""

        multi_latent_attention: bool = True
        q_lora_rank: int | None = 512
        normalization: str = "RMSNorm"
        rope_type: str = "yarn"
        rotary_base: float | None = 10000.0
        rotary_percent: float = 1.0
        rotary_scaling_factor: float = 40.0
        mscale: float = 0.707
        mscale_all_dim: float = 0.707
        max_position_embeddings: int | None = None
        """0.12's name of ``original_max_position_embeddings``, which it sets when it is given."""

        def __post_init__(self) -> None:
            _take_over(self)
            _leave_out(self, MLATransformerConfig)
            super().__post_init__()

    MLATransformerConfig.__module__, MLATransformerConfig.__qualname__ = _NAMES
    return MLATransformerConfig


def _take_over(config: Any) -> None:
    given, original = config.max_position_embeddings, config.original_max_position_embeddings
    if given is None or config.rope_type not in ROPE_TYPES_OF["original_max_position_embeddings"]:
        return
    if original not in (4096, given):
        raise ConfigError(
            f"max_position_embeddings is {given} and original_max_position_embeddings is {original}; "
            "expected one number, since both mean the same. Leave max_position_embeddings out."
        )
    config.original_max_position_embeddings = given


def _leave_out(config: Any, defaults: type) -> None:
    """YaRN's numbers go where another ``rope_type`` reads none of them: they are defaults of this class."""
    for field in FIELDS:
        kinds = ROPE_TYPES_OF.get(field.name)
        unread = kinds is not None and config.rope_type not in kinds
        if unread and getattr(config, field.name) == getattr(defaults, field.name):
            setattr(config, field.name, field.default)
