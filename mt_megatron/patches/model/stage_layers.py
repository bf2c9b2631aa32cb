"""Every layer is on some pipeline stage: uneven numbers of layers per stage and chunk, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ConfigError
from mt_megatron.parallel.stage_layers import end_counts
from mt_megatron.patching.spec import Patch

_BLOCK = "megatron.core.transformer.transformer_block"


def _num_layers_to_build(original: Callable[[Any], int], config: Any) -> int:
    from mt_megatron.layers.stage_layers import share_of_this_stage

    share = share_of_this_stage(config)
    return original(config) if share is None else share.count


def _layer_offset(original: Callable[[Any], int], self: Any) -> int:
    from mt_megatron.layers.stage_layers import layers_before_decoder, share_of_this_stage

    share = share_of_this_stage(self.config)
    return original(self) - layers_before_decoder(self.config) if share is None else share.offset


def _get_layer(original: Callable[[Any, int], Any], self: Any, layer_number: int) -> Any:
    from mt_megatron.layers.stage_layers import layer_or_nothing

    return layer_or_nothing(original, self, layer_number)


def _mamba_layers(original: Callable[[Any, Any], Any], self: Any, layer_type_list: Any) -> Any:
    from megatron.core import parallel_state

    config, stages = self.config, parallel_state.get_pipeline_model_parallel_world_size()
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if config.num_layers % stages or layout is not None or end_counts(config) != (None, None):
        raise ConfigError(
            f"found num_layers {config.num_layers} on {stages} pipeline stages for a Mamba model; expected a "
            "multiple and no number of layers per stage, since its blocks divide evenly and leave the "
            "remainder out. Change num_layers or pipeline_model_parallel_size"
        )
    return original(self, layer_type_list)


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="stage_layers.num_layers_to_build",
            target=f"{_BLOCK}:get_num_layers_to_build",
            kind="wrap",
            feature="model_config",
            reason="it leaves out the layers that do not divide over the stages, and knows no layout",
            body=_num_layers_to_build,
            digest="9516eff11260858df5dbf047337e7c78ec6cfc50c2438674bdf4d6d40b6550fd",
        ),
        Patch(
            id="stage_layers.layer_offset",
            target="megatron.core.transformer.transformer_layer:TransformerLayer._get_layer_offset",
            kind="wrap",
            feature="model_config",
            reason="layer numbers, and with them checkpoints, follow the layout; a decoder's begin with its "
            "own first stage, not the encoder's",
            body=_layer_offset,
            digest="97f6a831bd0438332fcbb6463df103e6567f0eed4dd3a8a0263146602aabee59",
        ),
        Patch(
            id="stage_layers.recomputed_layer",
            target=f"{_BLOCK}:TransformerBlock._get_layer",
            kind="wrap",
            feature="model_config",
            reason="uniform recomputation asks for layers beyond the last where runs do not come out even",
            body=_get_layer,
            digest="57bff2b9ac343d27a7b413ae6ecd5ea666e90e3c9183c94cb77ec0d389fc06bc",
        ),
        Patch(
            id="stage_layers.mamba",
            target="megatron.core.ssm.mamba_block:MambaStack._select_layers_for_pipeline_parallel",
            kind="wrap",
            feature="model_config",
            reason="it leaves out the layers that do not divide over the stages",
            body=_mamba_layers,
            digest="1383fdf39dedde34452ed753fb81fbc5fc4d8eb174fde80cc692710c90382c53",
        ),
    ]
