"""The ranks' side of the tests of the training loop: short runs on generated data."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mt_megatron
from mt_megatron.checkpoint import files as checkpoint_files
from mt_megatron.checkpoint.load import load_weights
from mt_megatron.config.parse import load_config
from mt_megatron.errors import MtMegatronError
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.evaluate import evaluate
from mt_megatron.training.loop import train
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, make_forward_step
from mt_megatron.training.validate import validate
from tests import index_cache
from tests.parity.case import SEQUENCE, Chain
from tests.second_lane import DAILY

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--vocab-size 4352 --make-vocab-size-divisible-by 64 --seq-length 32 --position-embedding-type rope "
    "--normalization RMSNorm --activation-func silu --gated-linear-unit --no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)
STEPS, HALF = (6, 3) if DAILY else (3, 1)
"""Steps of a whole run that is compared with one that stops half way and goes on."""

TRAINING = (
    "--lr 1e-2 --train-iters 6 --micro-batch-size 2 --global-batch-size 8 --eval-iters 2 --log-interval 1 "
    "--mock-data --tokenizer-type NullTokenizer --num-workers 0" + index_cache.flags()
)


def run(
    flags: str, folder: str, metrics: str, *, model: str = MODEL, training: str = TRAINING
) -> dict[str, Any]:
    """One run in this process; what it recorded (rank 0), or the error it ended with."""
    path = Path(folder) / f"{metrics}.jsonl"
    # Tracing and watching have tests of their own, and these would wait for their end each time.
    scan = "" if "--scan" in flags else "--scan off"
    scan += "" if "--scope" in flags else " --scope off"
    config = load_config(f"{model} {training} {scan} {flags} --metrics-path {path}".split())
    try:
        validate(config, world_size=dist.get_world_size() if dist.is_initialized() else 1)
        outcome = train(config)
    except MtMegatronError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        "steps": {
            r["iteration"]: [r["loss"], r["grad_norm"], r["lr"]] for r in records if r["event"] == "train"
        },
        "records": {r["iteration"]: r for r in records if r["event"] == "train"},
        "carried": [r["p2p_carried"] for r in records if r["event"] == "start"],
        "divergences": [r for r in records if r["event"] == "divergence"],
        "valid": [[r["iteration"], r["loss"], r["tokens"]] for r in records if r["event"] == "valid"],
        "iteration": outcome.progress.iteration,
        "consumed_samples": outcome.progress.consumed_samples,
        "skipped_iterations": outcome.progress.skipped_iterations,
        "finished": outcome.finished,
        "checkpoint": None if outcome.checkpoint is None else outcome.checkpoint.name,
    }


def start() -> None:
    """Patch, and make one default group for all runs of this process."""
    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    if "RANK" in os.environ:
        dist.init_process_group("gloo")


def interrupted_and_not(folder: str, layouts: dict[str, str]) -> dict[str, Any]:
    """For each layout a whole run of ``STEPS``, and one that stops after ``HALF`` and is continued."""
    start()
    results: dict[str, Any] = {}
    for name, flags in layouts.items():
        flags = f"{flags} --train-iters {STEPS}{'' if DAILY else ' --eval-iters 1'}"
        whole = run(f"{flags} --save {folder}/{name}_whole", folder, f"{name}_whole")
        first = run(f"{flags} --save {folder}/{name} --exit-interval {HALF}", folder, f"{name}_first")
        second = run(f"{flags} --save {folder}/{name}", folder, f"{name}_second")
        results[name] = {"whole": whole, "first": first, "second": second}
    return results


def moved_between_layouts(folder: str, before: str, after: list[str]) -> dict[str, Any]:
    """``HALF`` of the steps under one layout, the rest under others; and the whole run under the first."""
    start()
    steps = f"--train-iters {STEPS}"
    whole = run(f"{before} {steps} --save {folder}/whole", folder, "whole")
    run(f"{before} {steps} --save {folder}/source --exit-interval {HALF}", folder, "source")
    continued = [
        run(f"{flags} {steps} --resume {folder}/source --save {folder}/after{index}", folder, f"after{index}")
        for index, flags in enumerate(after)
    ]
    return {"whole": whole, "continued": continued}


def another_padding(folder: str, optimizer: str) -> dict[str, Any]:
    """A vocabulary of 4,352 is stored as it is, then padded to 4,608 for two tensor-parallel ranks."""
    start()
    plain = f"--hidden-dropout 0 --attention-dropout 0 {optimizer} --make-vocab-size-divisible-by"
    whole = run(f"{plain} 64 --save {folder}/whole", folder, "whole")
    run(f"{plain} 64 --save {folder}/source --exit-interval 3", folder, "source")
    flags = f"{plain} 256 --tensor-model-parallel-size 2 --resume {folder}/source --save {folder}/padded"
    padded = run(flags, folder, "padded")
    back = run(f"{plain} 64 --resume {folder}/padded --train-iters 8", folder, "back")
    return {"whole": whole, "padded": padded, "back": back}


def validations(folder: str, layouts: list[str], samples: int, limits: list[int | None]) -> list[Any]:
    """The same weights evaluated under each layout: loss and counted tokens for each limit."""
    start()
    run(f"--save {folder}/weights --train-iters 1 --eval-iters 0", folder, "weights")
    results = []
    for flags in layouts:
        config = load_config(f"{MODEL} {TRAINING} {flags}".split())
        with joined(config, mt_megatron.backend()) as job:
            family = family_of(config)
            trainable = build(config, job, family)
            load_weights(Path(folder) / "weights" / "iter_0000001", trainable)
            shape = Shape(
                num_microbatches=config.num_microbatches(job.layout.world_size),
                micro_batch_size=config.train.micro_batch_size,
                seq_length=SEQUENCE,
            )
            step = make_forward_step(family, job.backend.device(job.backend.current_device()))
            found = [
                evaluate(trainable, step, Chain(5, samples), shape, job, max_samples=limit)
                for limit in limits
            ]
            results.append([[each.loss, each.tokens] for each in found])
    return results


def failing_save(folder: str) -> dict[str, Any]:
    """Rank 0 cannot complete its second checkpoint of three, then not its last one, then not its only one."""
    start()
    original = checkpoint_files.publish

    def failing_at(name: str) -> Any:
        def publish(partial: Path, final: Path, owner: str) -> list[str]:
            if final.name == name:
                raise OSError(28, "No space left on device")
            return original(partial, final, owner)

        return publish

    checkpoint_files.publish = failing_at("iter_0000004")
    middle = run(f"--save {folder}/middle --save-interval 2", folder, "middle")
    checkpoint_files.publish = failing_at("iter_0000006")
    last = run(f"--save {folder}/last --save-interval 2 --async-save", folder, "last")
    only = run(f"--save {folder}/only", folder, "only")
    checkpoint_files.publish = original
    return {
        "middle": middle,
        "last": last,
        "only": only,
        "after": run(f"--save {folder}/last", folder, "again"),
    }


def refusals(folder: str) -> dict[str, Any]:
    """Checkpoints that do not fit."""
    start()
    run(f"--save {folder}/four --exit-interval 1", folder, "four")
    return {
        "layers": run(f"--save {folder}/four --num-layers 2", folder, "two"),
        "tied": run(f"--save {folder}/four --no-untie-embeddings-and-output-weights", folder, "tied"),
        "missing": run(f"--resume {folder}/nowhere", folder, "nowhere"),
        "strict": run(f"--save {folder}/four --lr 5e-3 --strict", folder, "strict"),
        "uneven": run("--num-layers 3 --pipeline-model-parallel-size 2", folder, "uneven"),
    }


def out_of_time(folder: str) -> dict[str, Any]:
    """A limit that is over before the first step is done."""
    start()
    return run(f"--save {folder}/timed --exit-duration-in-mins 0.00001", folder, "timed")
