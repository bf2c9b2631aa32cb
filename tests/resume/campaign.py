"""A run that is killed many times and continued each time, beside the same run left alone."""

from __future__ import annotations

import gc
import importlib
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint import files
from mt_megatron.training.logging.metrics import read_records
from tests.resume.forked import Kill, run_once

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--vocab-size 4352 --make-vocab-size-divisible-by 64 --seq-length 16 --position-embedding-type rope "
    "--normalization RMSNorm --activation-func silu --gated-linear-unit --no-add-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0.1 --attention-dropout 0.1"
)
TRAINING = (
    "--lr 1e-2 --micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --log-interval 1 --mock-data "
    "--tokenizer-type NullTokenizer --num-workers 0 --lr-warmup-iters 2"
)
INTERVAL = 3

LAYOUTS = {
    "dp2": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "tp2": "--tensor-model-parallel-size 2 --num-workers 1",
    "pp2": "--pipeline-model-parallel-size 2",
    "vpp2": "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
    # The experts' biases are in no optimizer, and count what was routed since the last update.
    "ep2": "--expert-model-parallel-size 2 --use-distributed-optimizer --family mixtral --num-moe-experts 4 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 24 "
    "--moe-layer-freq [0,1,1,1] --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall --mtp-num-layers 1",
}

BEFORE_FORKING = (
    "mt_megatron.config.parse",
    "mt_megatron.training.loop",
    "mt_megatron.training.validate",
    "mt_megatron.models.llama",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "torch._dynamo",
    "torch.distributed.tensor",
)
"""Imports of seconds, which every rank would otherwise repeat after each fork."""

POINTS = ("writing", "written", "manifest", "marker", "renamed", "pointer", "pruning", "done")


def campaign(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run each case (``layout``, ``bf16``, ``kills``, ``seed``) left alone and killed; what was recorded."""
    import mt_megatron

    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    for name in BEFORE_FORKING:
        importlib.import_module(name)
    assert threading.active_count() <= 2, "a fork takes no thread along but the one that forks"
    # What is here for good is not looked through again in every rank.
    gc.freeze()
    return [_case(Path(folder) / f"case{index}", **case) for index, case in enumerate(cases)]


def _case(
    folder: Path,
    *,
    layout: str,
    bf16: bool,
    kills: int,
    seed: int,
    forget_rng: bool = False,
    every_point: bool = False,
) -> dict[str, Any]:
    folder.mkdir(parents=True)
    began = time.monotonic()
    total = 9 + 4 * kills
    flags = f"{MODEL} {TRAINING} {LAYOUTS[layout]} --train-iters {total} --save-interval {INTERVAL}"
    flags += " --bf16" * bf16
    whole = _Run(folder / "whole", flags, forget_rng=False)
    assert not whole.go(None, background=True)
    killed = _Run(folder / "killed", flags, forget_rng=forget_rng)
    chance = random.Random(seed)
    made: list[str] = []
    chosen = [(point, background) for point in POINTS for background in (False, True)]
    while len(made) < kills:
        background = chosen[len(made)][1] if every_point else chance.random() < 0.5
        # What is forgotten can only be missed after a checkpoint.
        known = Kill(steps=2 * INTERVAL + 1) if forget_rng else None
        if every_point:
            known = Kill(point=chosen[len(made)][0])
        kill = known or _next_kill(chance, near_the_end=killed.step() > total - 4 * INTERVAL)
        if not killed.go(kill, background=background):
            break
        made.append(f"{'async' if background else 'sync'} {kill}")
    assert not killed.go(None, background=chance.random() < 0.5)
    return {
        "steps": total,
        "kills": made,
        "whole": whole.recorded(),
        "killed": killed.recorded(),
        "whole_files": whole.checksums(),
        "killed_files": killed.checksums(),
        "hidden": [each.name for each in killed.save.glob(".*")],
        "seconds": round(time.monotonic() - began, 1),
    }


def _next_kill(chance: random.Random, *, near_the_end: bool) -> Kill:
    kind = chance.choice(("start", "steps", "steps", "point", "point", "point"))
    if kind == "start":
        return Kill(seconds=chance.uniform(0.0, 1.0))
    if near_the_end:
        return Kill(point="writing", rank=chance.randrange(2))
    if kind == "steps":
        return Kill(steps=chance.randint(1, 2 * INTERVAL), delay=chance.uniform(0, 0.05))
    point = chance.choice(POINTS)
    rank = chance.randrange(2) if point == "writing" else 0
    return Kill(point=point, rank=rank, nth=chance.randint(1, 2))


class _Run:
    """One run in a folder, started as often as needed."""

    def __init__(self, folder: Path, flags: str, *, forget_rng: bool) -> None:
        folder.mkdir()
        self.save = folder / "checkpoints"
        self._metrics = folder / "metrics.jsonl"
        self._log, self._rendezvous = folder / "log", folder / "rendezvous"
        self._flags = f"{flags} --save {self.save} --save-keep-last 2 --metrics-path {self._metrics}"
        self._forget_rng = forget_rng

    def go(self, kill: Kill | None, *, background: bool) -> bool:
        """Start or continue it; whether it was killed."""
        arguments = f"{self._flags}{' --async-save' * background}".split()
        return run_once(2, lambda: self._work(arguments), kill, self._rendezvous, self._log)

    def _work(self, arguments: list[str]) -> None:
        from mt_megatron.checkpoint import load as checkpoint
        from mt_megatron.config.parse import load_config
        from mt_megatron.training.loop import train
        from mt_megatron.training.validate import validate

        if self._forget_rng:
            checkpoint.load_rng = lambda folder, job: {}
        config = load_config(arguments)
        validate(config, world_size=2)
        train(config)

    def step(self) -> int:
        """Step of the newest checkpoint."""
        newest = files.latest_named(self.save)
        return 0 if newest is None else files.iteration_of(newest) or 0

    def recorded(self) -> list[list[Any]]:
        """``[step, loss, grad norm, learning rate]`` of every step, repeated ones as often as they ran."""
        return [
            [r["iteration"], float(r["loss"]).hex(), float(r["grad_norm"]).hex(), r["lr"]]
            for r in read_records(self._metrics)
            if r["event"] == "train"
        ]

    def checksums(self) -> dict[str, Any]:
        """Checksums of what the last checkpoint says of weights, optimizer and random states."""
        newest = files.latest_checkpoint(self.save)
        assert newest is not None
        document = files.read_manifest(newest)
        assert files.damaged_files(newest, document) == []
        # Equal values of common.pt may be pickled in other bytes.
        kept = ("distcp", "rng/")
        return {name: entry for name, entry in document["files"].items() if any(k in name for k in kept)}


if __name__ == "__main__":
    # For one case by hand: python -m tests.resume.campaign FOLDER LAYOUT KILLS SEED [bf16]
    import json
    import sys

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    place, name, count, start, *more = sys.argv[1:]
    case = {"layout": name, "kills": int(count), "seed": int(start), "bf16": "bf16" in more}
    print(json.dumps(campaign(place, [case])[0], indent=1))
