"""What multi-latent attention cannot be built from or called with, said before anything is computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.layers.mla.spec import norm_is_in_linear
from mt_megatron.layers.rope.scaling import rope_scaling_of


def check_mla(config: Any) -> None:
    """Raises ConfigError for a TransformerConfig that MLA cannot be built from, as far as the config's
    own checks (``transformer_checks``) do not."""
    if not config.multi_latent_attention:
        raise ConfigError(
            "a multi-latent attention is built from a config without multi_latent_attention; expected "
            "TransformerConfig(multi_latent_attention=True), which also says its sizes"
        )
    if config.apply_rope_fusion:
        raise ConfigError(
            "apply_rope_fusion is set with multi_latent_attention; expected it unset: Apex's fused kernel "
            "rotates halves, and MLA's pairs are interleaved"
        )
    rope_scaling_of(config)


def check_submodules(submodules: Any) -> None:
    """Raises ConfigError for Transformer Engine's parts of another attention, left as they were."""
    if norm_is_in_linear(submodules):
        raise ConfigError(
            "the spec of a multi-latent attention holds Transformer Engine's linear_qkv with the norm of the "
            "layer's input in it; expected MLASelfAttentionSubmodules and a norm of the layer. Give the "
            "model the spec of one layer instead of a list: then both are put in"
        )


def check_down_projection(linear: Any, output_size: int) -> None:
    """Raises ConfigError where a spec's projection to a latent is split over the ranks."""
    found = getattr(linear, "weight", None)
    if isinstance(found, Tensor) and found.size(0) != output_size:
        raise ConfigError(
            f"the spec's projection down to {output_size} numbers has {found.size(0)} of them on this rank; "
            "expected all. Put ReplicatedLinear of mt_megatron.layers.mla.replicated_linear into the spec"
        )


def check_call(config: Any, key_value_states: Any, inference_params: Any, packed: Any) -> None:
    """Raises ConfigError for cross attention, a key-value cache, and packed sequences under context
    parallelism."""
    if key_value_states is not None:
        raise ConfigError(
            "key_value_states reached a multi-latent attention; expected None: it is self attention"
        )
    if inference_params is not None:
        raise ConfigError(
            "a key-value cache (inference_params) reached a multi-latent attention, which has none; expected "
            "None. Compute the whole sequence for each new token, or export the model to generate"
        )
    if packed is not None and config.context_parallel_size > 1:
        raise ConfigError(
            f"context_parallel_size is {config.context_parallel_size} and packed sequences were given; "
            "expected None: a rank holds chunks of one sequence, not of several. Keep documents apart with "
            "an attention mask"
        )


def check_angles(angles: Tensor, length: int, size: int) -> None:
    """Raises ConfigError unless ``angles`` [positions, b or 1, r] suffice for ``length`` tokens and r is
    ``size``."""
    if angles.size(-1) != size or angles.size(0) < length:
        raise ConfigError(
            f"rotary angles of {angles.size(0)} positions and {angles.size(-1)} numbers reached a "
            f"multi-latent attention of {length} tokens and qk_pos_emb_head_dim {size}; expected as many. "
            "Build the model while mt_megatron's patches of feature rope are in place"
        )
