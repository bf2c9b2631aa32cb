"""The process that counts the operations of a model's forward and backward pass as they are executed."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mt_megatron


def counted(argv: list[str]) -> dict[str, float]:
    """Operations per token: as torch counts them, by the family's definition, and as executed."""
    from mt_megatron.models.flops import executed_flops, forward_flops
    from mt_megatron.seams.schedule import run_schedule
    from mt_megatron.training.arguments import load_config
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.memory_estimate import padded_shape, recompute_of
    from mt_megatron.training.model import build, family_of
    from mt_megatron.training.step import make_forward_step
    from tests.models.memory_ranks import batches

    config = load_config(argv)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        step = make_forward_step(family, job.backend.device())
        sizes: dict[str, Any] = {
            "num_microbatches": 1,
            "seq_length": config.train.seq_length,
            "micro_batch_size": config.train.micro_batch_size,
        }
        # The counter knows matrix products, save for one in place; this kernel of attention is made of them.
        in_place: dict[Any, Any] = {torch.ops.aten.addmm_: _addmm}
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            run_schedule(step, trainable.chunks, [batches(config)], **sizes)
    flops = forward_flops(padded_shape(config), config.train.seq_length or 0)
    tokens = config.train.micro_batch_size * (config.train.seq_length or 0)
    recompute = recompute_of(config.model)
    return {
        "counted": counter.get_total_flops() / tokens,
        "family": family.flops(config),
        "training": flops.training,
        "executed": executed_flops(flops, recompute, chunk_layers=config.model.num_layers),
    }


def _addmm(into: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], *ignored: Any, **also: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    mt_megatron.patch("cpu")
    print("flops:" + json.dumps([counted(argv) for argv in json.loads(sys.argv[1])]))
