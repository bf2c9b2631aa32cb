"""The ranks' side of ``test_multi_token_prediction.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mt_megatron
from mt_megatron.checkpoint.load import load_weights
from mt_megatron.config.parse import load_config
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.evaluate import evaluate
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, make_forward_step
from tests.parity.case import SEQUENCE, Chain
from tests.training.architectures import loss_fusion_ranks
from tests.training.loop_cases import MODEL, TRAINING, run, start


def moved(folder: str, plans: dict[str, tuple[str, list[str]]]) -> dict[str, list[Any]]:
    """For each plan a whole run, and one that stops after 3 steps and is continued under other layouts."""
    start()
    found = {}
    for name, (before, after) in plans.items():
        place = f"{folder}/{name}"
        results = [run(f"{before} --save {place}/whole", folder, f"{name}_whole")]
        run(f"{before} --save {place}/source --exit-interval 3", folder, f"{name}_source")
        for index, flags in enumerate(after):
            to = f"--resume {place}/source --save {place}/after{index}"
            results.append(run(f"{flags} {to}", folder, f"{name}_after{index}"))
        found[name] = results
    return found


def reports(folder: str, flags: str) -> dict[str, Any]:
    """The same run with depths and without; TensorBoard's names of the first."""
    start()
    on = run(f"{flags} --tensorboard-dir {folder}/tensorboard --save {folder}/on", folder, "on")
    plain = "--hidden-dropout 0 --attention-dropout 0"
    return {
        "on": on,
        "off": run(plain, folder, "off"),
        "validated": _validated(folder, flags),
        "blocks": loss_fusion_ranks._train("--mtp-num-layers 2"),
        "tensorboard": _tags(Path(folder) / "tensorboard"),
    }


def _validated(folder: str, flags: str) -> dict[str, Any]:
    """Validation of the saved weights as they are, and with the depths taken away."""
    config = load_config(f"{MODEL} {TRAINING} {flags}".split())
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        load_weights(Path(folder) / "on" / "iter_0000006", trainable)
        shape = Shape(num_microbatches=1, micro_batch_size=2, seq_length=SEQUENCE)
        step = make_forward_step(family, job.backend.device(job.backend.current_device()))

        def validation() -> list[float]:
            found = evaluate(trainable, step, Chain(5, 4), shape, job, max_samples=None)
            return [found.loss, found.tokens]

        found = {"with depths": validation()}
        (chunk,) = trainable.bare_chunks()
        del chunk.mtp
        return {**found, "without": validation()}


def _tags(folder: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return sorted(tag for tag in events.Tags()["scalars"] if "mtp" in tag)


def refused(folder: str) -> dict[str, str]:
    """Runs that must not begin."""
    start()
    uneven = "--num-layers 5 --pipeline-model-parallel-size 2"
    context = "--mtp-num-layers 1 --context-parallel-size 2"
    return {
        "five layers": run(uneven, folder, "uneven")["error"],
        "context parallel": run(context, folder, "context")["error"],
    }
