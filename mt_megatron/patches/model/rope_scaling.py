"""Rotary positions stretched as the configuration says: linearly, as in Llama 3.1, or by YaRN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_EMBEDDING = "megatron.core.models.common.embeddings.rotary_pos_embedding"

_MODELS = {
    "gpt": (
        "megatron.core.models.gpt.gpt_model:GPTModel",
        "5e0d533836dbda291a928289a0fc1b9afb9fc6b44c0d8bdb899e29c45a728fa0",
    ),
    "bert": (
        "megatron.core.models.bert.bert_model:BertModel",
        "859ece26c428ffcaf2e751071050a50d46395fc8ace798a100cb66b154a0615e",
    ),
    "t5": (
        "megatron.core.models.T5.t5_model:T5Model",
        "6c96bd69771108c8359d37ed5f271f9fab8a92707e6c2bb0c5697636cd4e1065",
    ),
    "mamba": (
        "megatron.core.models.mamba.mamba_model:MambaModel",
        "deff96c7a4f75c50cc4b7598486e0abf0807cd3d3604a97af911010c5bfaea23",
    ),
}
"""Name -> the class that builds a rotary embedding, and the digest of its ``__init__``."""


def _embedding(
    original: Callable[..., None],
    self: Any,
    kv_channels: int,
    rotary_percent: float,
    rotary_interleaved: bool = False,
    seq_len_interpolation_factor: float | None = None,
    rotary_base: int = 10000,
    use_cpu_initialization: bool = False,
    *,
    rope_scaling: bool = False,
    rope_scaling_factor: float = 8.0,
) -> None:
    from mt_megatron.layers.rope.embedding import scale_llama3

    original(
        self,
        kv_channels,
        rotary_percent,
        rotary_interleaved,
        seq_len_interpolation_factor,
        rotary_base,
        use_cpu_initialization,
    )
    # Upstream forgets it.
    self.rotary_base = rotary_base
    if rope_scaling:
        scale_llama3(self, rope_scaling_factor)


def _model(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    from mt_megatron.layers.rope.embedding import fit_to_config

    original(self, *args, **kwargs)
    fit_to_config(self)


def _gpt(
    original: Callable[..., None],
    self: Any,
    *args: Any,
    rope_scaling: bool = False,
    rope_scaling_factor: float = 8.0,
    **kwargs: Any,
) -> None:
    """With the two arguments of Megatron-Core 0.12."""
    from mt_megatron.layers.rope.embedding import fit_to_config, scale_llama3

    original(self, *args, **kwargs)
    if rope_scaling and self.position_embedding_type == "rope":
        scale_llama3(self.rotary_pos_emb, rope_scaling_factor)
    fit_to_config(self)


def _apply(
    original: Callable[..., Any], t: Any, freqs: Any, config: Any, cu_seqlens: Any | None = None
) -> Any:
    packed_pairs = cu_seqlens is not None and config.rotary_interleaved
    if packed_pairs or getattr(config, "rope_type", "rope") == "yarn":
        from mt_megatron.layers.rope.embedding import apply_stretched

        stretched = apply_stretched(t, freqs, config, cu_seqlens)
        if stretched is not None:
            return stretched
    return original(t, freqs, config, cu_seqlens)


def patches(backend: Backend) -> list[Patch]:
    models = [
        Patch(
            id=f"rope.{name}_model",
            target=f"{target}.__init__",
            kind="wrap",
            feature="rope",
            reason="its rotary embedding knows neither the configuration's rope_type nor its rotary_base",
            body=_gpt if name == "gpt" else _model,
            digest=digest,
        )
        for name, (target, digest) in _MODELS.items()
    ]
    return [
        Patch(
            id="rope.embedding",
            target=f"{_EMBEDDING}:RotaryEmbedding.__init__",
            kind="wrap",
            feature="rope",
            reason="it takes no rope_scaling, as Megatron-Core 0.12's does, and forgets its base",
            body=_embedding,
            digest="e7973b8747a04632273e9e99b2a038a749240e3daf143602e771814262343c48",
        ),
        Patch(
            id="rope.apply",
            target=f"{_EMBEDDING}:apply_rotary_pos_emb",
            kind="wrap",
            feature="rope",
            reason="YaRN multiplies cosines and sines by a factor, for which upstream has no place; with "
            "packed sequences it drops rotary_interleaved",
            body=_apply,
            digest="e5c8f3250fc20c148dda6843bbbef104fdfb72645421e590d8a77f1a54cc4cdd",
        ),
        *models,
    ]
