"""A GPT small enough for any test, the same whatever the layout, and one training step on it."""

from __future__ import annotations

import gc
import zlib
from typing import Any

import torch

VOCABULARY, SEQUENCE, BATCH = 32, 8, 2


def start(tp: int = 1, pp: int = 1, cp: int = 1, **patching: Any) -> None:
    """Patch for the CPU and make this job's process groups, in place of earlier ones."""
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.parallel import rank_layout as layout

    mt_megatron.patch("cpu", **patching)
    gc.freeze()  # else every collection at the end of a run visits the modules
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    elif parallel_state.model_parallel_is_initialized():
        layout.destroy()
    layout.initialize(
        layout.RankLayout(world_size=dist.get_world_size(), tp=tp, pp=pp, cp=cp), mt_megatron.backend()
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def transformer_config(**overrides: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**values, **overrides})


def build(config: Any, *, share: bool = False) -> Any:
    """The model with weights that depend on their names and global positions alone."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=share,
        position_embedding_type="rope",
    )
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shard(name, full_weight(name, parameter, size), rank, size))
    return model


def full_weight(name: str, parameter: torch.Tensor, size: int) -> torch.Tensor:
    """The whole weight of which ``parameter`` is one of ``size`` shards."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= size
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator) * 0.1
    return noise + 1.0 if "norm" in name and name.endswith("weight") else noise


def partition_dim(name: str) -> int | None:
    if "norm" in name:
        return None
    return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0


def shard(name: str, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rank ``rank``'s part. Gate and up halves of ``linear_fc1`` are split apart, each by itself."""
    dim = partition_dim(name)
    if dim is None or size == 1:
        return full
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim)[rank]


def gather(name: str, part: torch.Tensor) -> torch.Tensor:
    """The whole gradient from every tensor parallel rank's part."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    dim = partition_dim(name)
    if dim is None or size == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    if "linear_fc1" in name:
        halves = [p.chunk(2) for p in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    return torch.cat(parts, dim)


def batch(seed: int = 0, size: int = BATCH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (size, SEQUENCE + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": torch.arange(SEQUENCE).expand(size, -1),
    }


def forward_step(batches: Any, model: Any) -> Any:
    data = next(batches)
    output = model(data["tokens"], data["positions"], None, labels=data["labels"])

    def loss(output: torch.Tensor) -> Any:
        mean = output.mean()
        return mean, {"loss": float(mean.detach())}

    return output, loss


def train_step(chunk: Any, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """Forward, backward and finalize over the micro-batches; the losses, where there are any."""
    from mt_megatron.seams.schedule import run_schedule

    reported = run_schedule(
        forward_step,
        [chunk],
        iter(batches),
        num_microbatches=len(batches),
        seq_length=SEQUENCE,
        micro_batch_size=batches[0]["tokens"].size(0),
    )
    return [entry["loss"] for entry in reported]


def distributed(config: Any, model: Any, **options: Any) -> Any:
    """``model`` in Megatron's DistributedDataParallel, with its gradients finalised by the schedule."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(**options), model)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync if options.get("overlap_grad_reduce") else None
    return wrapped


def whole_gradients(model: Any) -> dict[str, list[float]]:
    return {
        name: gather(name, parameter.main_grad.detach()).double().flatten().tolist()
        for name, parameter in model.named_parameters()
    }
