"""One rank of the training that ``scan_cost.py`` traces and does not trace in turn."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from throughput_sides import Case, Ours, token_ids

ARMS = ("off", "off again", "base", "full")
_RHYTHM_SECONDS = 0.5
_FLUSH_SECONDS = 0.4

SHAPE = Case(
    name="L4 h256 V4096",
    layers=4,
    hidden=256,
    ffn=704,
    heads=8,
    groups=4,
    vocabulary=4096,
    dtype=torch.float32,
    sequence=256,
    micro_batch=2,
    micro_batches=2,
)


class Training:
    """Steps of one training, some of them traced."""

    def __init__(self, scratch: Path, ranks: int) -> None:
        import mt_megatron

        warnings.filterwarnings("ignore")
        mt_megatron.patch("cpu")
        spread = ("--tensor-model-parallel-size", str(ranks)) if ranks > 1 else ()
        self.ours = Ours(SHAPE, token_ids(SHAPE), spread)
        self.scratch = scratch
        self.iteration = 0

    def steps(self, count: int) -> None:
        """Take ``count`` steps."""
        from mt_megatron.seams import events

        for _ in range(count):
            self.iteration += 1
            with events.span("step", iteration=self.iteration):
                self.ours.step()

    def timed(self, count: int) -> tuple[float, float]:
        """Seconds of ``count`` steps, which begin together on all ranks: by the wall, and of processors."""
        if dist.is_initialized():
            dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        self.steps(count)
        return time.perf_counter() - began, time.process_time() - used

    def traced(self, level: str) -> Iterator[Any]:
        """A session at ``level``; ends when it is asked for the next."""
        from mt_megatron.scan.session import Session
        from mt_megatron.seams import events

        if level == "off":
            assert not events.listening(), "somebody listens although nothing is traced"
            yield None
            return
        session = Session(
            self.scratch / "run",
            rank=self.ours.job.rank,
            layout=self.ours.job.layout,
            backend=self.ours.job.backend,
            level=level,  # type: ignore[arg-type]
            modules=self.ours.trainable.chunks,
        )
        session.start()
        yield session
        recorder = session.recorder
        session.close()
        assert recorder is not None and recorder.failed is None, "the recorder failed"
        assert not events.listening(), "the recorder still listens"


def main() -> None:
    """Take the rounds; rank 0 writes what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--block-seconds", type=float, required=True)
    args = parser.parse_args()
    import os

    training = Training(args.scratch, int(os.environ["WORLD_SIZE"]))
    training.steps(5)
    step = _agreed(statistics.median(training.timed(2)[0] / 2 for _ in range(8)))
    per_block = max(1, round(args.block_seconds / step))
    rng = np.random.default_rng(0)
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    processors: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    heard: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(args.rounds):
        for arm in rng.permutation(ARMS).tolist():
            # Where in the background thread's period the blocks begin is left to chance.
            settling = _RHYTHM_SECONDS + rng.uniform(0, _FLUSH_SECONDS)
            visit = training.traced(arm.partition(" ")[0])
            session = next(visit)
            training.steps(2 if session is None else max(2, math.ceil(settling / step)))
            before = 0 if session is None else session.recorder.heard
            took = [training.timed(per_block) for _ in range(args.blocks)]
            if session is not None:
                heard[arm].append((session.recorder.heard - before) / sum(each[0] for each in took))
            next(visit, None)
            seconds[arm].append([each[0] for each in took])
            processors[arm].append([each[1] for each in took])
            shutil.rmtree(args.scratch / "run", ignore_errors=True)
    if training.ours.job.rank == 0:
        about = {
            "shape": SHAPE.name,
            "tokens_per_step": SHAPE.tokens,
            "ranks": training.ours.job.layout.world_size,
            "threads": torch.get_num_threads(),
            "step_seconds": step,
            "steps_per_block": per_block,
            "events_per_second": {arm: statistics.mean(found) for arm, found in heard.items() if found},
        }
        text = json.dumps({"seconds": seconds, "processor_seconds": processors, "about": about})
        (args.scratch / "blocks.json").write_text(text)
    training.ours.close()


def _agreed(seconds: float) -> float:
    """Rank 0's figure on all ranks."""
    if not dist.is_initialized():
        return seconds
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.broadcast(told, 0)
    return float(told)


if __name__ == "__main__":
    main()
