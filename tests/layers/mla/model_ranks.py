"""Models with multi-latent attention over two ranks: training, checkpoints, context parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.layers.mla.case import Shape, build, random_shapes, reference, relative
from tests.layers.mla.ranks import start

VOCABULARY, TOKENS = 64, 80
REPLICATED = ("down_proj", "q_layernorm", "kv_layernorm")


def gpt(seed: int = 5, **more: Any) -> Any:
    """A GPT of two layers whose initial weights do not depend on the layout."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 48,
            "num_attention_heads": 4,
            "ffn_hidden_size": 64,
            "multi_latent_attention": True,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_head_dim": 10,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 14,
            "rope_type": "yarn",
            "rotary_scaling_factor": 8.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            "init_method_std": 0.2,
            **more,
        }
    )
    torch.manual_seed(seed)
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, TOKENS, position_embedding_type="rope")


def losses(model: Any) -> Tensor:
    drawn = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(TOKENS).expand(2, -1)
    found: Tensor = model(drawn[:, :-1], positions, None, labels=drawn[:, 1:])
    return found


def train(*, unmark: bool = False, **more: Any) -> dict[str, Any]:
    """Losses of three steps of SGD, the latents' parameters after them, and whether all ranks agree."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = gpt(**more)
    if unmark:
        for name, parameter in model.named_parameters():
            if "kv_down_proj" in name:
                parameter.sequence_parallel = False
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    options = OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    optimizer = get_megatron_optimizer(options, [ddp])
    found = []
    for _ in range(3):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = losses(ddp).mean()
        loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        found.append(float(loss.detach()))
    shared = {n: p.detach() for n, p in model.named_parameters() if any(word in n for word in REPLICATED)}
    equal = True
    for value in shared.values():
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value)
        equal &= all(torch.equal(part, parts[0]) for part in parts)
    return {"losses": found, "shared": shared, "equal": equal}


def trained() -> dict[str, Any]:
    """Every layout against one rank: the losses' and the shared parameters' largest differences."""
    from megatron.core.distributed import finalize_model_grads as finalize

    start()
    wanted = train()
    start(tensor_model_parallel_size=2)
    tensor = {"tensor_model_parallel_size": 2}
    runs = {
        "tp2": train(**tensor),
        "tp2 qk_layernorm": train(**tensor, qk_layernorm=True),
        "tp2 sp": train(**tensor, sequence_parallel=True),
        "tp2 sp qk_layernorm": train(**tensor, sequence_parallel=True, qk_layernorm=True),
        "tp2 sp unmarked": train(**tensor, sequence_parallel=True, unmark=True),
    }
    module = __import__(finalize.__module__, fromlist=["finalize_model_grads"])
    ours = module._allreduce_layernorm_grads
    module._allreduce_layernorm_grads = ours.__wrapped__
    try:
        runs["tp2 qk_layernorm as upstream"] = train(**tensor, qk_layernorm=True)
    finally:
        module._allreduce_layernorm_grads = ours
    return {
        name: {
            "losses": max(abs(a - b) for a, b in zip(run["losses"], wanted["losses"], strict=True)),
            "shared": max(relative(run["shared"][n], wanted["shared"][n]) for n in wanted["shared"]),
            "equal": run["equal"],
        }
        for name, run in runs.items()
    }


def initialised() -> dict[str, bool]:
    """Parameters drawn on the device by Megatron's RNG tracker: which are equal on both ranks."""
    start(tensor_model_parallel_size=2)
    found = {}
    for name, parameter in gpt(tensor_model_parallel_size=2, use_cpu_initialization=False).named_parameters():
        parts = [torch.empty_like(parameter.data) for _ in range(2)]
        dist.all_gather(parts, parameter.data)
        found[name] = torch.equal(*parts)
    return {name: equal for name, equal in found.items() if "layers.1.self_attention" in name}


def checkpoint(folder: str) -> dict[str, float]:
    """Saved by two tensor-parallel ranks, loaded by them and by one: difference of the losses."""
    from megatron.core import dist_checkpointing

    start(tensor_model_parallel_size=2)
    saved = gpt(seed=6, tensor_model_parallel_size=2)
    with torch.no_grad():
        wanted = losses(saved)
        dist_checkpointing.save(saved.sharded_state_dict(), folder)
        found = {}
        for name, sizes in {"tp2": {"tensor_model_parallel_size": 2}, "tp1": {}}.items():
            start(**sizes)
            model = gpt(seed=7, **sizes)
            found[f"{name} before"] = relative(losses(model), wanted)
            model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder), strict=False)
            found[name] = relative(losses(model), wanted)
    return found


def context_parallel() -> dict[str, Any]:
    """A sequence over two ranks against transformers' attention of all of it."""
    from megatron.core import parallel_state

    from mt_megatron.parallel.context_parallel import part_of_sequence

    start(context_parallel_size=2)
    rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()
    shape = Shape(**{**vars(random_shapes(1, seed=20)[0]), "tokens": 96})
    wanted, results = reference(shape), {}
    for name, more in {"plain": {}, "recomputed": {"recompute_mla_up_proj": True}}.items():
        module = build(shape, context_parallel_size=2, **more)
        hidden, probe, output, gradient = (
            part_of_sequence(t, 0, rank, 2)
            for t in (shape.input(), shape.probe(), wanted["output"], wanted["input"])
        )
        hidden.requires_grad_()
        found, _ = module(hidden, None)
        (found * probe).sum().backward()
        worst = [relative(found.detach(), output), relative(hidden.grad, gradient)]
        for parameter_name, parameter in module.named_parameters():
            dist.all_reduce(parameter.grad, group=group)
            worst.append(relative(parameter.grad, wanted[parameter_name.removesuffix(".weight")]))
        results[name] = max(worst)
    return results
