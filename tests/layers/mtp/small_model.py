"""A small GPT with multi-token prediction whose weights depend on their names in the whole model alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
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


def _step(per_token: bool) -> Any:
    from megatron.core.utils import get_model_config

    def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        data = next(iterator)
        given = {"loss_mask": data["mask"]} if get_model_config(model).mtp_num_layers else {}
        losses = model(data["tokens"], data["positions"], None, labels=data["labels"], **given)

        def loss(losses: torch.Tensor) -> Any:
            total, count = (losses * data["mask"]).sum(), data["mask"].sum()
            report = {"loss": float(total.detach()), "tokens": float(count)}
            return (total, count.int(), report) if per_token else (total / count, report)

        return losses, loss

    return forward_step


def train(chunks: list[Any], transformer: Any, data: list[Any]) -> list[dict[str, float]]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    from mt_megatron.seams.schedule import run_schedule

    options = DistributedDataParallelConfig()
    wrapped = [DistributedDataParallel(transformer, options, chunk) for chunk in chunks]
    transformer.finalize_model_grads_func = finalize_model_grads
    reports: list[dict[str, float]] = run_schedule(
        _step(transformer.calculate_per_token_loss),
        wrapped,
        [iter(data) for _ in wrapped],
        num_microbatches=len(data),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    return reports


def depths(chunks: list[Any]) -> list[float] | None:
    blocks = [chunk.mtp for chunk in chunks if getattr(chunk, "mtp", None) is not None]
    return blocks[0].take_reported().flatten().tolist() if blocks else None
