"""One rank of ``slow_link.py``: steps of the trainer by upstream's schedule or by ``auto``, as lines on
stdin say.

A line ``upstream N`` or ``auto N`` runs N steps and answers with one JSON line: seconds of each, and what
``auto`` runs now. In between it waits and uses no processor."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Side:
    """A model on two stages, and both ways of running its steps."""

    def __init__(self, flags: list[str], log: str | None, pace: float) -> None:
        import mt_megatron
        from mt_megatron.config.parse import load_config
        from mt_megatron.models.families import family_of
        from mt_megatron.pipeline.choice import parse
        from mt_megatron.training.distributed import joined
        from mt_megatron.training.model import build
        from mt_megatron.training.step import Shape, make_forward_step

        mt_megatron.patch("cpu")
        config = load_config(flags)
        self._joined = joined(config, mt_megatron.backend())
        self.job = self._joined.__enter__()
        family = family_of(config)
        self._trainable = build(config, self.job, family)
        self._forward_step: Any = make_forward_step(
            family, self.job.backend.device(self.job.backend.current_device())
        )
        if pace:
            self._forward_step = paced(self._forward_step, pace / len(self._trainable.chunks))
        sequence, vocabulary = config.train.seq_length, config.model.vocab_size
        assert sequence is not None and vocabulary is not None
        self._shape = Shape(
            num_microbatches=config.num_microbatches(2),
            micro_batch_size=config.train.micro_batch_size,
            seq_length=sequence,
        )
        generator = torch.Generator().manual_seed(0)
        shape = (self._shape.num_microbatches, self._shape.micro_batch_size, sequence + 1)
        self._tokens = torch.randint(vocabulary, shape, generator=generator)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        self.auto: Any = parse("auto").source(2, chunks)
        self.auto.begin_at(0, folder=None if log is None else Path(log), say=_say)
        self._sources: dict[str, Any] = {}
        self._steps = 0

    def source(self, arm: str) -> Any:
        """``auto``; another schedule by its name; None for ``upstream``."""
        from mt_megatron.pipeline.choice import parse

        if arm in ("auto", "upstream"):
            return self.auto if arm == "auto" else None
        return self._sources.setdefault(arm, parse(arm).source(2, len(self._trainable.chunks)))

    def step(self) -> float:
        """One step; its loss."""
        from mt_megatron.training.step import train_step

        self._steps += 1
        batches = [self._batches() for _ in self._trainable.chunks]
        result = train_step(
            self._trainable, self._forward_step, batches, self._shape, self.job, iteration=self._steps
        )
        return result.loss

    def _batches(self) -> Any:
        length = self._shape.seq_length
        for rows in self._tokens:
            yield {
                "tokens": rows[:, :-1].contiguous(),
                "labels": rows[:, 1:].contiguous(),
                "loss_mask": torch.ones(rows.shape[0], length),
                "position_ids": torch.arange(length).expand(rows.shape[0], -1).contiguous(),
            }


def paced(forward_step: Any, seconds: float) -> Any:
    """``forward_step`` in which an F of a chunk takes ``seconds`` at least, and its B and W as much again,
    spent asleep: what others do on the machine hardly changes them."""

    def step(batches: Any, model: Any) -> Any:
        begin = time.perf_counter()
        output, loss = forward_step(batches, model)
        time.sleep(max(0.0, begin + seconds - time.perf_counter()))
        return _Pace.apply(output, seconds), loss

    return step


class _Pace(torch.autograd.Function):
    """The identity; its gradient takes time, and so do the weight gradients behind it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        from mt_megatron.seams.gemm import wgrad_queue

        queue, seconds = wgrad_queue(), ctx.seconds
        if queue is None:
            seconds *= 2
        else:
            queue.put(gradient, lambda: time.sleep(seconds))
        time.sleep(seconds)
        return gradient, None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", default=None)
    parser.add_argument("--pace", type=float, default=0.0)
    options, flags = parser.parse_known_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from mt_megatron.pipeline.execute.source import set_pipeline_schedule

    side = Side(flags, options.log, options.pace)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        arm, count = line.split()
        set_pipeline_schedule(side.source(arm))
        dist.barrier()
        seconds, loss = [], 0.0
        for _ in range(int(count)):
            begin = time.perf_counter()
            loss = side.step()
            seconds.append(time.perf_counter() - begin)
        answer = {
            "seconds": seconds,
            "loss": loss,
            "runs": side.auto.running_label,
            "sums": side.auto.reductions,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
