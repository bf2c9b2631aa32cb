"""The process that says how much memory a forward and backward pass took at its worst moment."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

import mt_megatron


def peak(argv: list[str]) -> dict[str, int]:
    """Bytes beyond what was held before: by the allocator's events at their highest, and as predicted."""
    from mt_megatron.seams.schedule import run_schedule
    from mt_megatron.training.arguments import load_config
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.memory_estimate import memory_of
    from mt_megatron.training.model import build, family_of
    from mt_megatron.training.step import make_forward_step
    from tests.models.memory_ranks import batches

    config = load_config(argv)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        forward_step = make_forward_step(family, job.backend.device())

        def run() -> None:
            for chunk in trainable.chunks:
                chunk.zero_grad_buffer()
            run_schedule(
                forward_step,
                trainable.chunks,
                [batches(config)],
                num_microbatches=1,
                seq_length=config.train.seq_length or 0,
                micro_batch_size=config.train.micro_batch_size,
            )

        run()  # What is made once and kept is made here.
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            run()
        memory = memory_of(config, 1, on_cpu=True).worst
        return {"measured": _highest(profile), "predicted": memory.activations + memory.workspace}


def _highest(profile: Any) -> int:
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    mt_megatron.patch("cpu")
    print("peaks:" + json.dumps([peak(argv) for argv in json.loads(sys.argv[1])]))
