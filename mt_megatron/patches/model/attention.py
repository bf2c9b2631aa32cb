"""The local GPT layer spec carries our core attention, also for scripts that use it directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def _local_spec(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from mt_megatron.layers.attention.core import DotProductAttention

    spec = original(*args, **kwargs)
    spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    return spec


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="attention.local_spec",
            target="megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec",
            kind="wrap",
            feature="attention",
            reason="upstream's local attention builds the s x s scores and expands grouped heads",
            body=_local_spec,
            digest="010e04f8034e502d7243e7964a5c5c63c1da7b6c50e61d6950b95dd9735d44a2",
        )
    ]
