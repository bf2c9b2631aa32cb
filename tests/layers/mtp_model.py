"""A small GPT with multi-token prediction whose weights depend on their names in the whole model alone."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.patches import small_gpt
from tests.patches.small_gpt import BATCH, SEQUENCE, VOCABULARY

DEPTHS, FACTOR, LAYERS = 2, 0.3, 4


def config(**overrides: Any) -> Any:
    """A ``TransformerConfig`` of ``LAYERS`` layers and ``DEPTHS`` depths for the process groups there are."""
    values: dict[str, Any] = {
        "num_layers": LAYERS,
        "mtp_num_layers": DEPTHS,
        "mtp_loss_scaling_factor": FACTOR,
        "add_bias_linear": False,
    }
    return small_gpt.transformer_config(**{**values, **overrides})


def build(transformer: Any, *, tied: bool = False, spec: Any = None) -> list[Any]:
    """This rank's chunks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    chunks = []
    for index in range(transformer.virtual_pipeline_model_parallel_size or 1):
        if transformer.virtual_pipeline_model_parallel_size:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        chunks.append(
            GPTModel(
                transformer,
                spec or get_gpt_layer_local_spec(num_experts=transformer.num_moe_experts),
                VOCABULARY,
                SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
            )
        )
    return chunks


def set_weights(chunks: list[Any]) -> None:
    """The same whole weights under every layout; a copy of a weight gets what the weight gets."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, parameter in whole_names(chunks).items():
            whole = small_gpt.full_weight(name, parameter, size)
            parameter.copy_(small_gpt.shard(name, whole, rank, size))


def whole_names(chunks: list[Any]) -> dict[str, Any]:
    """Parameters by their names in a model of one stage."""
    found = {}
    for chunk in chunks:
        tied = chunk.share_embeddings_and_output_weights
        for name, parameter in chunk.named_parameters():
            match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
            if match:
                number = chunk.decoder.layers[int(match[1])].layer_number - 1
                name = f"decoder.layers.{number}.{match[2]}"
            elif tied and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            found[name] = parameter
    return found


def batches(count: int, *, masked: bool = True) -> list[dict[str, torch.Tensor]]:
    """Micro-batches with a random loss mask each."""
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(1000 + seed)
        data = small_gpt.batch(seed)
        mask = torch.rand(BATCH, SEQUENCE, generator=generator) > 0.3
        data["mask"] = mask.float() if masked else torch.ones(BATCH, SEQUENCE)
        found.append(data)
    return found
