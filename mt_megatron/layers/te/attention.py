"""Core attention with the constructor of Megatron-Core's ``TEDotProductAttention``."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.layers.attention.core import DotProductAttention
from mt_megatron.layers.te.names import MODULE


class TEDotProductAttention(DotProductAttention):
    """``layers.attention.core.DotProductAttention``, whose forward says what masks mean.

    Unlike Transformer Engine's, causal attention looks at a mask too, as the local layer spec's does.
    Raises ConfigError for a ``config.window_size`` that is no pair.
    """

    __module__ = MODULE

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
    ) -> None:
        window = config.window_size
        if window is not None and not (isinstance(window, tuple | list) and len(window) == 2):
            raise ConfigError(f"window_size is {window!r}; expected None or a pair (left, right)")
        super().__init__(config, layer_number, attn_mask_type, attention_type, attention_dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """As the base class; of packed sequences their borders alone say what is masked."""
        if packed_seq_params is not None:
            attention_mask = None
        return super().forward(query, key, value, attention_mask, attn_mask_type, packed_seq_params)
