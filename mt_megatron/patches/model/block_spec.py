"""Layers of one model may differ: dense ones among those with experts, and latent attention in all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ConfigError
from mt_megatron.layers.block_spec import has_uniform_layers, is_varied, layer_specs
from mt_megatron.patching.spec import Patch

_BLOCK = "megatron.core.transformer.transformer_block"


def _get_block_submodules(original: Callable[..., Any], config: Any, spec: Any) -> Any:
    from dataclasses import replace

    from megatron.core.transformer.transformer_layer import BaseTransformerLayer, TransformerLayer

    found = original(config, spec)
    of_one_layer = isinstance(getattr(spec, "module", None), type) and issubclass(
        spec.module, BaseTransformerLayer
    )
    if not of_one_layer or not is_varied(config):
        return found  # also where the caller has said layer by layer what he wants
    # Upstream's own function, which is asked here as the layers will ask it while they are built.
    offset = TransformerLayer._get_layer_offset(SimpleNamespace(config=config))
    varied = layer_specs(spec, config)[offset : offset + len(found.layer_specs)]
    return replace(found, layer_specs=varied)


def _sharded_state_dict(
    original: Callable[..., Any],
    self: Any,
    prefix: str = "",
    sharded_offsets: Any = (),
    metadata: Any = None,
) -> Any:
    if not has_uniform_layers(self.config):
        # Layers that hold different parameters have names of their own instead of a place in a stack.
        metadata = {**(metadata or {}), "non_homogeneous_layers": True}
    return original(self, prefix, sharded_offsets, metadata)


def _get_gpt_decoder_block_spec(
    config: Any,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
) -> Any:
    """The layers of this pipeline stage and the norm behind the last, as in Megatron-Core 0.12.

    Returns a ``TransformerBlockSubmodules``. Raises ``ConfigError`` for ``qk_l2_norm``, and for a
    ``normalization`` other than the configuration's.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block

    if qk_l2_norm:
        raise ConfigError("qk_l2_norm is on; expected off: there is no such norm. Leave it out.")
    if normalization not in (None, config.normalization):
        raise ConfigError(
            f"normalization is {normalization} beside config.normalization {config.normalization}; expected "
            "one of them. Leave the argument out."
        )
    make = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        if use_transformer_engine
        else gpt_layer_specs.get_gpt_layer_local_spec
    )
    spec = make(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    return transformer_block._get_block_submodules(config, spec)


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="block_spec.layers",
            target=f"{_BLOCK}:_get_block_submodules",
            kind="wrap",
            feature="moe",
            reason="it repeats one layer, so no dense layers among experts and no latent attention",
            body=_get_block_submodules,
            digest="c2f241eb9f60c764440684373f570c1ae018b79e2a2b9f47bc14a72f550fbdcd",
        ),
        Patch(
            id="block_spec.sharded_state_dict",
            target=f"{_BLOCK}:TransformerBlock.sharded_state_dict",
            kind="wrap",
            feature="moe",
            reason="it stacks the parameters of all layers, which dense ones among experts do not share",
            body=_sharded_state_dict,
            digest="0b653540f4bccb9294aa21660d23fbe0b239c0b96be634d100de7851dab7cbe0",
        ),
        Patch(
            id="block_spec.decoder",
            target="megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec",
            kind="add",
            feature="moe",
            reason="scripts for later versions ask for the specs of all layers by it",
            body=_get_gpt_decoder_block_spec,
        ),
    ]
