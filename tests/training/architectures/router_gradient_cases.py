"""The ranks' side of the test of routers' gradients with sequences spread over processes."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.layers.moe import router_losses
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, forward_backward, make_forward_step
from mt_megatron.training.validate import validate
from tests.training.loop_cases import MODEL, TRAINING, start

EXPERTS = (
    "--family mixtral --num-moe-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--hidden-dropout 0 --attention-dropout 0 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1.0 --moe-z-loss-coeff 0.1"
)


def batch(length: int, *, masked: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.randint(4096, (2, length + 1), generator=torch.Generator().manual_seed(7))
    mask = torch.ones(2, length)
    if masked:
        # Ranks of a context count different numbers of tokens.
        mask[:, : length // 4], mask[:, ::3] = 0, 0
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": torch.arange(length).expand(2, -1).contiguous(),
    }


def summed_over_context(step: Any) -> Any:
    """``step`` with the result of Megatron-LM 0.9's loss function: of all context parallel ranks."""
    from megatron.core import parallel_state

    def summed(batches: Any, model: Any) -> Any:
        output, loss_function = step(batches, model)

        def loss(output: torch.Tensor) -> Any:
            total, tokens, report = loss_function(output)
            both = torch.stack([total, tokens.float()])
            dist.all_reduce(both, group=parallel_state.get_context_parallel_group())
            size = parallel_state.get_context_parallel_world_size()
            return both[0] * size, both[1].detach().to(torch.int), report

        return output, loss

    return summed


def gradients(flags: str, *, masked: bool = False, summed: bool = False) -> list[list[float]]:
    """Of every router, after two micro-batches of the same tokens, reduced as for an update."""
    config = load_config(f"{MODEL} {TRAINING} {EXPERTS} {flags}".split())
    validate(config, world_size=dist.get_world_size())
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        for name, parameter in trainable.chunks[0].named_parameters():
            # By name alone: what a layout draws for itself is another matter.
            drawn = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(crc32(name.encode()))
            )
            parameter.data.copy_(0.1 * drawn + ("norm" in name))
        shape = Shape(num_microbatches=2, micro_batch_size=2, seq_length=32)
        step = make_forward_step(family, torch.device("cpu"))
        if summed:
            step = summed_over_context(step)
        forward_backward(trainable, step, [iter([batch(32, masked=masked)] * 2)], shape)
        return [
            parameter.main_grad.flatten().tolist()
            for name, parameter in trainable.chunks[0].named_parameters()
            if name.endswith("router.weight")
        ]


def everything(world: int) -> dict[str, Any]:
    start()
    spread = "--context-parallel-size 2" if world == 2 else ""
    found: dict[str, Any] = {
        "mean": gradients(spread),
        "per token": gradients(f"{spread} --calculate-per-token-loss"),
        "per token, masked": gradients(f"{spread} --calculate-per-token-loss", masked=True),
    }
    if world == 2:
        for name, masked in (("summed", False), ("summed, masked", True)):
            found[name] = gradients(f"{spread} --calculate-per-token-loss", masked=masked, summed=True)
    ours = router_losses.loss_scale_factor
    router_losses.loss_scale_factor = lambda config, num_microbatches: 1
    try:
        found["upstream's scale"] = gradients(spread)
    finally:
        router_losses.loss_scale_factor = ours
    return found
