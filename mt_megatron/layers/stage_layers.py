"""Layers of this rank's current model chunk, for divisions that upstream's formula cannot express."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.parallel import stage_order
from mt_megatron.parallel.stage_layers import divide_layers, end_counts


@dataclass(frozen=True, kw_only=True)
class Share:
    """A run of consecutive layers."""

    offset: int
    """The first of them, 0-based among all layers of the model."""

    count: int
    """How many they are; a stage with the embedding or the output layer may have none."""


def share_of_this_stage(config: Any) -> Share | None:
    """What the current chunk of this rank builds; None where upstream's own arithmetic gives it.

    That is the case when all virtual stages have the same number of layers, none was given, and stages are
    no V. Raises
    ``ConfigError`` when a layer would be left out, or when ``config`` and the process groups differ.
    """
    from megatron.core import parallel_state

    first, last = end_counts(config)
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    stages = config.pipeline_model_parallel_size
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    divided = divide_layers(
        config.num_layers,
        stages=stages,
        chunks=chunks,
        layout=layout,
        first=first,
        last=last,
        mtp_num_layers=getattr(config, "mtp_num_layers", None) or 0,
    )
    if layout is None and (first, last) == (None, None) and not stage_order.is_v():
        return None
    if layout is None and (first, last) != (None, None) and stage_order.is_v():
        raise ConfigError(
            f"found {first} layers in the first pipeline stage and {last} in the last with stages in a V, "
            "where the first rank has both; expected none. Give pipeline_model_parallel_layout, which names "
            "every stage's"
        )
    size = parallel_state.get_pipeline_model_parallel_world_size()
    if size != stages:
        raise ConfigError(
            f"pipeline_model_parallel_size is {stages} in the TransformerConfig and {size} in the process "
            "groups; expected the same where layers are given per stage. Change one of them"
        )
    chunk = (parallel_state.get_virtual_pipeline_model_parallel_rank() or 0) if chunks > 1 else 0
    index = stage_order.virtual_stage(parallel_state.get_pipeline_model_parallel_rank(), chunk, stages)
    return Share(offset=sum(map(len, divided[:index])), count=len(divided[index]))


def layers_before_decoder(config: Any) -> int:
    """Layers that upstream's offset counts for the encoder's stages before this one, a stage of the decoder:
    they are those of another block. 0 elsewhere."""
    from megatron.core import parallel_state

    inside = parallel_state.is_inside_encoder()
    stages: int = 0 if inside else parallel_state._PIPELINE_MODEL_PARALLEL_DECODER_START
    layers: int = config.num_layers // config.pipeline_model_parallel_size
    return stages * layers


def layer_or_nothing(original: Callable[[Any, int], Any], block: Any, index: int) -> Any:
    """Layer ``index`` of ``block``, or one that passes its input on where a run of recomputed layers is
    longer than what is left of the stage: upstream counts in whole runs."""
    return original(block, index) if index < len(block.layers) else _passed_on


def _passed_on(hidden_states: Any, context: Any = None, **_: Any) -> tuple[Any, Any]:
    return hidden_states, context
