"""The ranks' side of the router tests: biases after steps of every layout, and losses of divided tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

EXPERTS, TOPK, HIDDEN, SEQUENCE, BATCH, VOCABULARY, RATE = 8, 2, 32, 8, 2, 32, 0.01


@contextmanager
def layout(**sizes: Any) -> Iterator[None]:
    """This job's ranks as ``sizes`` say, in place of earlier groups."""
    import mt_megatron
    from mt_megatron.parallel import rank_layout as ranks

    mt_megatron.patch("cpu")
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    ranks.initialize(ranks.RankLayout(world_size=dist.get_world_size(), **sizes), mt_megatron.backend())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()


def config_of(**overrides: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "init_method_std": 0.3,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": RATE,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }
    return TransformerConfig(**{**values, **overrides})


class Job:
    """A small GPT with experts, its optimizer, and what its routers chose."""

    def __init__(self, pattern: list[int], *, chunks: int = 1, **overrides: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        sizes = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
        self.config = config_of(moe_layer_freq=pattern, num_layers=len(pattern), **sizes, **overrides)
        self.chunks: list[Any] = []
        for index in range(chunks):
            if chunks > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(index)
            model = GPTModel(
                self.config,
                get_gpt_layer_local_spec(num_experts=EXPERTS),
                VOCABULARY,
                SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                position_embedding_type="rope",
            )
            ddp = DistributedDataParallelConfig()
            self.chunks.append(DistributedDataParallel(self.config, ddp, model, disable_bucketing=index > 0))
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), self.chunks)
        from mt_megatron.layers.moe.expert_bias import routers_of

        self.routers = [router for chunk in self.chunks for router in routers_of(chunk)]
        self.chosen: dict[int, Tensor] = {}
        for router in self.routers:
            router.register_forward_hook(self._look)

    def _look(self, router: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        counts = torch.bincount(output[1].flatten(), minlength=EXPERTS)
        self.chosen[router.layer_number] = self.chosen.get(router.layer_number, 0) + counts

    def forward_backward(self, seed: int, *, forward_only: bool = False) -> None:
        from megatron.core import parallel_state

        from mt_megatron.seams.schedule import run_schedule

        seed = 10 * seed + parallel_state.get_data_parallel_rank()

        def batches() -> Iterator[Tensor]:
            generator = torch.Generator().manual_seed(seed)
            while True:
                yield torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)

        run_schedule(
            _forward_step,
            self.chunks,
            [batches() for _ in self.chunks],
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )

    def step(self, seed: int, *, skipped: bool = False) -> None:
        """As an unmodified training script makes one."""
        self.chosen.clear()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.forward_backward(seed)
        if skipped:
            # What an overflow in fp16 makes of it.
            self.optimizer.prepare_grads = lambda: True
        applied, *_ = self.optimizer.step()
        assert applied is not skipped
        self.optimizer.__dict__.pop("prepare_grads", None)

    def biases(self) -> dict[int, list[float]]:
        return {router.layer_number: router.expert_bias.tolist() for router in self.routers}

    def by_hand(self) -> dict[int, list[float]]:
        """The bias of each layer of this rank after one step from zero, in plain Python."""
        everybody: list[Any] = [None] * dist.get_world_size()
        mine = {number: counts.tolist() for number, counts in self.chosen.items()}
        dist.all_gather_object(everybody, mine)
        found = {}
        for number in mine:
            totals = [0] * EXPERTS
            for of_rank in everybody:
                totals = [a + b for a, b in zip(totals, of_rank.get(number, [0] * EXPERTS), strict=True)]
            mean = sum(totals) / EXPERTS
            found[number] = [RATE * ((mean > n) - (mean < n)) for n in totals]
        return found


def _forward_step(batches: Iterator[Tensor], model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    output = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return output, lambda output: (output.mean(), {})


def steps(folder: str, name: str, pattern: list[int], chunks: int, **overrides: Any) -> dict[str, Any]:
    """Three steps, the second skipped, and a validation between them."""
    job = Job(pattern, chunks=chunks, **overrides)
    found: dict[str, Any] = {"layers": sorted(job.biases())}
    job.step(1)
    first = job.biases()
    found["first"] = [first, job.by_hand()]
    found["counts zeroed"] = not any(int(r.local_tokens_per_expert.sum()) for r in job.routers)
    job.step(2, skipped=True)
    found["skipped"] = [job.biases(), first]
    for chunk in job.chunks:
        chunk.eval()
    job.forward_backward(3, forward_only=True)
    for chunk in job.chunks:
        chunk.train()
    job.step(4)
    moved = {n: [a - b for a, b in zip(bias, first[n], strict=True)] for n, bias in job.biases().items()}
    found["third"] = [moved, job.by_hand()]
    found["saved"] = save_and_load(job, Path(folder) / name)
    return found


def save_and_load(job: Job, folder: Path) -> dict[str, Any]:
    """Biases through a distributed checkpoint, as the model is and as bf16 makes it."""
    from megatron.core import dist_checkpointing, parallel_state

    def state() -> dict[str, Any]:
        found = {}
        for index, chunk in enumerate(job.chunks):
            if len(job.chunks) > 1:
                # Layers are named by their number in the whole model, which depends on the chunk.
                parallel_state.set_virtual_pipeline_model_parallel_rank(index)
            found[f"model{index}"] = chunk.module.sharded_state_dict(
                metadata={"non_homogeneous_layers": True}
            )
        return found

    before = job.biases()
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(state(), str(folder))
    for router in job.routers:
        router.bfloat16()
        router.expert_bias.fill_(7.0)
    dtypes = {str(router.expert_bias.dtype) for router in job.routers}
    loaded = dist_checkpointing.load(state(), str(folder))
    for index, chunk in enumerate(job.chunks):
        chunk.module.load_state_dict(loaded[f"model{index}"])
    return {"before": before, "after": job.biases(), "dtypes": sorted(dtypes)}


def over_world() -> dict[str, Any]:
    """Negative control: the sum that an ancestor took, over all ranks and so over all stages."""
    from mt_megatron.layers.moe import expert_bias

    job = Job([1, 1])
    ours = expert_bias._sum_over_copies
    expert_bias._sum_over_copies = dist.all_reduce
    try:
        job.step(1)
    finally:
        expert_bias._sum_over_copies = ours
    return {"wrong": [job.biases(), job.by_hand()]}


def recomputed() -> dict[str, Any]:
    """The same step with layers computed once and twice, by both kinds of checkpointing."""
    plain, full = (
        Job([0, 1, 1, 1]),
        Job([0, 1, 1, 1], recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    )
    whole = Job([0, 1, 1, 1], moe_layer_recompute=True)
    other = Job([0, 1, 1, 1])
    for job in (full, whole, other):
        for mine, theirs in zip(job.chunks, plain.chunks, strict=True):
            mine.load_state_dict(theirs.state_dict())
    for layer in other.chunks[0].module.decoder.layers:
        layer.mlp.forward = _twice(layer.mlp.forward)
    counts = {}
    for name, job in (("plain", plain), ("full", full), ("moe layer", whole), ("torch's", other)):
        for chunk in job.chunks:
            chunk.zero_grad_buffer()
        job.forward_backward(1)
        counts[name] = [router.local_tokens_per_expert.tolist() for router in job.routers]
    return {"counts": counts, "tokens": 2 * BATCH * SEQUENCE * TOPK}


def _twice(forward: Any) -> Any:
    def again(*args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)

    return again


KINDS: dict[str, dict[str, Any]] = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss"},
    "aux_loss softmax": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
    },
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "z_loss": {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.1},
    "alltoall_seq": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_token_dispatcher_type": "alltoall_seq",
    },
}


def loss_gradient(kind: str, **overrides: Any) -> dict[str, Any]:
    """What one router's losses do to its weight and to the tokens, over all ranks; and what is tracked."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import (
        MoEAuxLossAutoScaler,
        clear_aux_losses_tracker,
        reduce_aux_losses_tracker_across_ranks,
    )
    from megatron.core.transformer.moe.router import TopKRouter

    options = {"moe_aux_loss_coeff": 0.1, **KINDS[kind], **overrides}
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        options["sequence_parallel"] = True
    router = TopKRouter(config_of(**options))
    router.set_layer_number(2)
    generator = torch.Generator().manual_seed(3)
    router.weight.data = torch.randn(router.weight.shape, generator=generator)
    hidden = torch.randn(SEQUENCE, 3, HIDDEN, generator=generator)
    group = parallel_state.get_tensor_and_context_parallel_group()
    mine = hidden.chunk(group.size())[group.rank()].clone().requires_grad_()
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(()))
    clear_aux_losses_tracker()
    probs, _ = router(mine)
    (probs * 0.0).sum().backward()
    weight, tokens = router.weight.grad.clone(), [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_reduce(weight, group=group)
    dist.all_gather(tokens, mine.grad, group=group)
    reduce_aux_losses_tracker_across_ranks()
    tracked = {
        name: values["values"].tolist()
        for name, values in parallel_state.get_moe_layer_wise_logging_tracker().items()
    }
    return {"weight": weight.tolist(), "hidden": torch.cat(tokens).tolist(), "tracked": tracked}


def tracker_without_experts_everywhere() -> dict[str, Any]:
    """Stage 0 has no experts and so tracks nothing; the reduction ends, with the same on both."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import (
        clear_aux_losses_tracker,
        reduce_aux_losses_tracker_across_ranks,
    )

    # Groups that were made anew make a tracker that is empty.
    before = copy.copy(parallel_state.get_moe_layer_wise_logging_tracker())
    job = Job([0, 0, 1, 1], moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01)
    job.forward_backward(1)
    tracked = sorted(parallel_state.get_moe_layer_wise_logging_tracker())
    reduce_aux_losses_tracker_across_ranks()
    values = {
        name: each["values"].tolist()
        for name, each in parallel_state.get_moe_layer_wise_logging_tracker().items()
    }
    clear_aux_losses_tracker()
    return {"before": len(before), "tracked": tracked, "values": values}


def everything(world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if world == 1:
        with layout():
            for kind in KINDS:
                found[kind] = loss_gradient(kind)
            found["per token"] = loss_gradient("seq_aux_loss", calculate_per_token_loss=True)
            found["recomputed"] = recomputed()
        return found
    with layout():
        found["dp2"] = steps(folder, "dp2", [0, 1, 1], 1)
    with layout(ep=2):
        found["ep2"] = steps(folder, "ep2", [0, 1, 1], 1)
    with layout(pp=2):
        found["pp2, one stage without"] = steps(folder, "none", [0, 0, 1, 1], 1)
        found["pp2, unequal"] = steps(folder, "unequal", [0, 1, 1, 1], 1)
        found["over world"] = over_world()
    with layout(pp=2):
        found["tracker"] = tracker_without_experts_everywhere()
    with layout(pp=2, vpp=2):
        found["vpp2"] = steps(folder, "vpp2", [0, 1, 1, 1], 2)
    with layout(tp=2):
        found["tp2"] = {kind: loss_gradient(kind) for kind in KINDS}
    with layout(cp=2):
        found["cp2"] = {kind: loss_gradient(kind) for kind in KINDS if kind != "alltoall_seq"}
    return found


def combined(folder: str) -> dict[str, Any]:
    """Four ranks: two ways of dividing the work at once."""
    found = {}
    with layout(tp=2):
        found["tp2 dp2"] = steps(folder, "tp2", [0, 1, 1], 1, sequence_parallel=True)
    with layout(pp=2, ep=2):
        found["pp2 ep2"] = steps(folder, "pp2", [0, 1, 1, 1], 1)
    return found
