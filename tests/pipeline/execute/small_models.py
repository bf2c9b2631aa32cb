"""Small GPT chunks for every placement, one step on them by any schedule, and digests of what it computed."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.patches import small_gpt
from tests.patches.small_gpt import BATCH, SEQUENCE, VOCABULARY

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied": True},
    "moe": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_token_dispatcher_type": "alltoall",
    },
    "grouped": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    },
    "mtp": {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
    "mtp tied": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3, "tied": True},
    "recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "per token": {"calculate_per_token_loss": True},
    "biased": {"add_bias_linear": True, "normalization": "LayerNorm", "bias_activation_fusion": False},
    "fused": {"gradient_accumulation_fusion": True},
    "fused mtp": {"gradient_accumulation_fusion": True, "mtp_num_layers": 1, "tied": True},
}
"""Overrides of the configuration; ``tied`` is an argument of the model."""


def start(
    pp: int, vpp: int | None = None, v: bool = False, tp: int = 1, cp: int = 1, ep: int = 1, seed: int = 1
) -> None:
    """Patch for the CPU and make this job's process groups, in place of earlier ones."""
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.parallel import rank_layout as layout

    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    elif parallel_state.model_parallel_is_initialized():
        layout.destroy()
    sizes = layout.RankLayout(world_size=dist.get_world_size(), tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp, v=v)
    layout.initialize(sizes, mt_megatron.backend())
    seed_all(seed)


def seed_all(seed: int) -> None:
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


class Pipeline:
    """This rank's chunks, wrapped for data parallelism."""

    def __init__(
        self,
        model: str,
        *,
        layers: int,
        bf16: bool = False,
        ddp: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.module import Float16Module

        options = {**MODELS[model], **overrides}
        tied = options.pop("tied", False)
        count = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.config = config = small_gpt.transformer_config(
            **{
                "num_layers": layers,
                "virtual_pipeline_model_parallel_size": count,
                "context_parallel_size": parallel_state.get_context_parallel_world_size(),
                "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
                "bf16": bf16,
                "params_dtype": dtype,
                "pipeline_dtype": dtype,
                "overlap_p2p_comm": bool(count),
                "batch_p2p_comm": not count,
                "deallocate_pipeline_outputs": True,
                **options,
            }
        )
        self.bare: list[Any] = []
        for index in range(count or 1):
            if count:
                parallel_state.set_virtual_pipeline_model_parallel_rank(index)
            self.bare.append(
                GPTModel(
                    config,
                    get_gpt_layer_local_spec(
                        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
                    ),
                    VOCABULARY,
                    SEQUENCE,
                    pre_process=parallel_state.is_pipeline_first_stage(),
                    post_process=parallel_state.is_pipeline_last_stage(),
                    share_embeddings_and_output_weights=tied,
                    position_embedding_type="rope",
                )
            )
        self._set_weights()
        wrapped = [Float16Module(config, chunk) if bf16 else chunk for chunk in self.bare]
        given = dict(ddp or {})
        aligned = given.pop("aligned", False)
        self.ddp = DistributedDataParallelConfig(**given)
        self.chunks = [
            DistributedDataParallel(config, self.ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(wrapped)
        ]
        config.finalize_model_grads_func = finalize_model_grads
        if self.ddp.overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = functions if len(functions) > 1 else functions[0]
        if aligned:
            starts = [chunk.start_grad_sync for chunk in self.chunks]
            config.grad_sync_func = starts if len(starts) > 1 else starts[0]

    def _set_weights(self) -> None:
        """The same whole weights under every layout; a copy of a weight gets what the weight gets."""
        from megatron.core import parallel_state

        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        with torch.no_grad():
            for name, parameter in self.whole_names().items():
                name = name.rstrip("@")
                whole = small_gpt.full_weight(name, parameter, size)
                split = getattr(parameter, "tensor_model_parallel", False)
                parameter.copy_(small_gpt.shard(name, whole, rank, size) if split else whole)

    def whole_names(self) -> dict[str, Any]:
        """Parameters by their names in a model of one stage; of a last stage's copies, marked."""
        found = {}
        for chunk in self.bare:
            for name, parameter in chunk.named_parameters():
                if name.startswith("decoder.layers."):
                    _, _, local, rest = name.split(".", 3)
                    name = f"decoder.layers.{chunk.decoder.layers[int(local)].layer_number - 1}.{rest}"
                elif chunk.share_embeddings_and_output_weights and name == "output_layer.weight":
                    name = "embedding.word_embeddings.weight"
                # In a V one rank has both.
                found[name + ("@" if name in found else "")] = parameter
        return found

    def batches(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Micro-batches with a random loss mask each: what this rank has of its data-parallel rank's."""
        from megatron.core import parallel_state

        from mt_megatron.parallel.context_parallel import part_of_sequence

        rank, found = parallel_state.get_data_parallel_rank(), []
        for index in range(count):
            seed = 100 * rank + index
            data = small_gpt.batch(seed)
            generator = torch.Generator().manual_seed(1000 + seed)
            data["mask"] = (torch.rand(BATCH, SEQUENCE, generator=generator) > 0.3).float()
            size, part = (
                parallel_state.get_context_parallel_world_size(),
                parallel_state.get_context_parallel_rank(),
            )
            if size > 1:
                data = {name: part_of_sequence(value, 1, part, size) for name, value in data.items()}
            found.append(data)
        return found

    def step(self, microbatches: int, *, forward_only: bool = False, data: Any = None) -> list[Any]:
        """One step by whatever schedule is in force; what the loss reported."""
        from mt_megatron.seams.schedule import run_schedule

        data = self.batches(microbatches) if data is None else data
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            for parameter in self.whole_names().values():
                parameter.grad = None
        with torch.set_grad_enabled(not forward_only):
            return run_schedule(
                _forward_step(self.config),
                self.chunks,
                [iter(data) for _ in self.chunks],
                num_microbatches=microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=forward_only,
            )

    def digests(self, reports: list[Any]) -> dict[str, Any]:
        """Reports, and every gradient, statistic and random state of this rank, to the bit."""
        from megatron.core import parallel_state

        found: dict[str, Any] = {
            name: _digest(parameter.main_grad) for name, parameter in self.whole_names().items()
        }
        for name, kept in parallel_state.get_moe_layer_wise_logging_tracker().items():
            found[f"tracked {name}"] = _digest(kept["values"])
            kept["values"].zero_()
        for chunk in self.bare:
            block = getattr(chunk, "mtp", None)
            if block is not None:
                reported = block.take_reported()
                found["mtp"] = None if reported is None else reported.flatten().tolist()
        return {**found, "reports": reports}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _forward_step(config: Any) -> Any:
    def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        data = next(iterator)
        given = {"loss_mask": data["mask"]} if getattr(config, "mtp_num_layers", None) else {}
        losses = model(data["tokens"], data["positions"], None, labels=data["labels"], **given)

        def loss(losses: torch.Tensor) -> Any:
            total, count = (losses * data["mask"]).sum(), data["mask"].sum()
            report = {"loss": float(total.detach()), "tokens": float(count)}
            if config.calculate_per_token_loss:
                return total, count.int(), report
            return total / count, report

        return losses, loss

    return forward_step
