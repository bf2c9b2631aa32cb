"""One rank of ``simulator_error.py``: steps of a pipeline as JSON lines on stdin ask for them.

A line names flags of ``mt-megatron pretrain``, a schedule, micro-batches, steps, perhaps a pace of every
stage, and perhaps a folder for a trace; the answer holds begin and end of every step on the machine's clock.
In between the rank waits and uses no processor."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from slow_link_worker import paced  # noqa: E402

from mt_megatron.seams import events  # noqa: E402


def run(asked: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """One block: a model, steps that warm up, and steps that count."""
    import mt_megatron
    from mt_megatron.config.parse import load_config
    from mt_megatron.models.families import family_of
    from mt_megatron.planning.validate.model import model_problems
    from mt_megatron.scan.session import session
    from mt_megatron.seams.schedule import run_schedule
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build
    from mt_megatron.training.step import make_forward_step

    count = asked["microbatches"]
    config = load_config([*flags, *asked["flags"], "--global-batch-size", str(count)])
    if problems := model_problems(config):
        raise SystemExit("\n".join(problems))
    times: list[tuple[float, float]] = []
    with joined(config, mt_megatron.backend()) as job, ExitStack() as stack:
        family = family_of(config)
        trainable = build(config, job, family)
        forward_step: Any = make_forward_step(family, job.backend.device(job.backend.current_device()))
        if asked.get("pace"):
            stages = _stages(job, len(trainable.chunks))
            seconds = {
                id(chunk): asked["pace"][stage] for chunk, stage in zip(trainable.chunks, stages, strict=True)
            }
            forward_step = _at_pace(forward_step, seconds)
        if asked.get("trace"):
            stack.enter_context(session(asked["trace"], watch=False))
        length = config.train.seq_length
        assert length is not None
        tokens = torch.randint(
            int(config.model.vocab_size or 0),
            (count, config.train.micro_batch_size, length + 1),
            generator=torch.Generator().manual_seed(0),
        )
        for number in range(asked["warm_up"] + asked["steps"]):
            for chunk in trainable.chunks:
                chunk.zero_grad_buffer()
            dist.barrier()
            with events.span("step", iteration=number):
                begin = time.perf_counter()
                run_schedule(
                    forward_step,
                    trainable.chunks,
                    [_batches(tokens, length) for _ in trainable.chunks],
                    num_microbatches=count,
                    seq_length=length,
                    micro_batch_size=config.train.micro_batch_size,
                )
                end = time.perf_counter()
            if number >= asked["warm_up"]:
                times.append((begin, end))
        dist.barrier()
        overlap = bool(trainable.core.overlap_p2p_comm)
    return {"times": times, "overlap": overlap}


def _stages(job: Any, chunks: int) -> list[int]:
    """Stage of each chunk of this rank."""
    pp, ranks = job.at.pp, job.layout.pp
    return [pp, 2 * ranks - 1 - pp] if job.layout.v else [chunk * ranks + pp for chunk in range(chunks)]


def _at_pace(forward_step: Any, seconds: dict[int, float]) -> Any:
    by_chunk = {key: paced(forward_step, each) for key, each in seconds.items()}
    return lambda batches, model: by_chunk[id(model)](batches, model)


def _batches(tokens: torch.Tensor, length: int) -> Iterator[dict[str, torch.Tensor]]:
    for rows in tokens:
        yield {
            "tokens": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "loss_mask": torch.ones(rows.shape[0], length),
            "position_ids": torch.arange(length).expand(rows.shape[0], -1).contiguous(),
        }


def main() -> None:
    import mt_megatron

    _, flags = argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_known_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    mt_megatron.patch("cpu")
    dist.init_process_group("gloo")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), flags)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
