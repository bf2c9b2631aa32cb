"""Specs of multi-token prediction, from the layer spec of the model it belongs to."""

from __future__ import annotations

from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.layers.block_spec import is_varied, layer_specs


def gpt_mtp_block_spec(config: Any, spec: Any, use_transformer_engine: bool) -> Any:
    """A ``MultiTokenPredictionBlockSubmodules`` for the last virtual pipeline stage, None elsewhere.

    ``spec`` is the model's: of a layer, or of a block. Each depth gets a layer like the model's last one.
    Megatron-Core 0.12: ``gpt_layer_specs.get_gpt_mtp_block_spec``. Raises ``ConfigError`` when no layer is
    to be found in ``spec``.
    """
    from megatron.core import parallel_state

    if not config.mtp_num_layers or not parallel_state.is_pipeline_last_stage():
        return None
    return mtp_block_spec(config, spec, use_transformer_engine)


def mtp_block_spec(config: Any, spec: Any, use_transformer_engine: bool | None = None) -> Any:
    """As ``gpt_mtp_block_spec``, whatever the stage. None: the classes that ``spec`` has decide."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mt_megatron.layers.mtp.layer import (
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )

    layer = _last_layer(config, spec)
    if use_transformer_engine is None:
        linear = layer.submodules.self_attention.submodules.linear_proj
        use_transformer_engine = "transformer_engine" in linear.__module__
    norm, linear = _classes(use_transformer_engine)
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=linear, transformer_layer=layer, layer_norm=norm
    )
    depth = ModuleSpec(module=MultiTokenPredictionLayer, submodules=submodules)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[depth] * config.mtp_num_layers)


def _classes(use_transformer_engine: bool) -> tuple[Any, Any]:
    from megatron.core.models.gpt import gpt_layer_specs

    if not use_transformer_engine:
        return gpt_layer_specs.LNImpl, gpt_layer_specs.ColumnParallelLinear
    if not gpt_layer_specs.HAVE_TE:
        raise ConfigError(
            "multi-token prediction was asked for with Transformer Engine's layers, and transformer_engine "
            "cannot be imported; install it, or use use_transformer_engine=False and the local layer spec"
        )
    return gpt_layer_specs.TENorm, gpt_layer_specs.TEColumnParallelLinear


def _last_layer(config: Any, spec: Any) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    module = getattr(spec, "module", None)
    if isinstance(module, type) and issubclass(module, TransformerBlock):
        spec = spec.submodules
    if isinstance(spec, TransformerBlockSubmodules):
        if not spec.layer_specs:
            raise ConfigError(
                "the block spec of the last pipeline stage has no layer, so that multi-token prediction has "
                "none to be like; expected one. Give GPTModel an mtp_block_spec made from a layer's spec, or "
                "the last stage a layer"
            )
        return spec.layer_specs[-1]
    if isinstance(module, type) and issubclass(module, BaseTransformerLayer):
        return layer_specs(spec, config)[-1] if is_varied(config) else spec
    raise ConfigError(
        f"found {spec!r:.200} as the spec for multi-token prediction; expected a ModuleSpec of a transformer "
        "layer or a TransformerBlockSubmodules. Change the spec"
    )
