"""The ranks' side: norms of every step beside copies of all weights, for each kind of optimizer."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.models.families import family_of
from mt_megatron.scope.watch import parameters
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, make_forward_step, train_step
from tests.parity.case import MICRO_BATCH, SEQUENCE
from tests.scope.watch.ranks import batches_of, begin, deferred, watched
from tests.scope.watch.reader import values_of

STEPS = 4


def norms(cases: dict[str, str]) -> dict[str, Any]:
    """For each case the steps' norms as recorded (rank 0) and as copies say."""
    begin()
    found = {}
    for name, flags in cases.items():
        kept = {name: vars(parameters)[name] for name in ("_PIECE", "_TOGETHER", "_waits_for")}
        with deferred() if name.startswith("deferred") else nullcontext():
            if name.endswith("pieces"):
                parameters._PIECE, parameters._TOGETHER = 1000, 2500
            if "steps on a device" in name:
                parameters._waits_for = lambda step: isinstance(step, torch.Tensor)
            found[name] = _train(flags)
        vars(parameters).update(kept)
    return found


def _train(flags: str) -> dict[str, Any]:
    copied = "COPIED" in flags
    config = load_config([*flags.replace("COPIED", "").split(), "--seed", "5", "--mock-data"])
    rule = parameters._rule
    if copied:
        # As an optimizer whose state tells nothing.
        parameters._rule = lambda share: None
    try:
        with joined(config, mt_megatron.backend()) as job:
            family = family_of(config)
            trainable = build(config, job, family)
            held = trainable.optimizer.get_parameters()
            distributed = config.parallel.use_distributed_optimizer
            shape = Shape(
                num_microbatches=config.num_microbatches(job.layout.world_size),
                micro_batch_size=MICRO_BATCH,
                seq_length=SEQUENCE,
            )
            batches = [batches_of(job, 5, STEPS) for _ in trainable.chunks]
            forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
            expected: dict[str, list[float]] = {"gradient_norm": [], "update_ratio": [], "weight_norm": []}
            skipped = []

            def total(squares: list[torch.Tensor]) -> float:
                whole = torch.stack([each.double().square().sum() for each in squares]).sum()
                if distributed:
                    dist.all_reduce(whole)
                return float(whole)

            with watched(config, job, trainable) as (observed, reader):
                for iteration in range(1, STEPS + 1):
                    gradients: list[torch.Tensor] = []

                    class Both:
                        def gradients_ready(self, gradients: Any = gradients) -> None:
                            gradients += [each.grad.detach().clone() for each in held]
                            observed.gradients_ready()

                        def updated(self, *, skipped: bool) -> None:
                            observed.updated(skipped=skipped)

                    before = [each.detach().clone() for each in held]
                    observed.begin(iteration)
                    result = train_step(
                        trainable, forward_step, batches, shape, job, iteration=iteration, observer=Both()
                    )
                    observed.end(iteration, result)
                    skipped.append(result.skipped)
                    after = [each.detach().clone() for each in held]
                    moved = total([a - b for a, b in zip(after, before, strict=True)])
                    expected["update_ratio"].append(math.sqrt(moved / total(before)))
                    expected["weight_norm"].append(math.sqrt(total(after)))
                    expected["gradient_norm"].append(math.sqrt(total(gradients)) if gradients else -1.0)
                    if result.grad_norm is not None and gradients:
                        assert math.isclose(result.grad_norm, expected["gradient_norm"][-1], rel_tol=1e-4)
    finally:
        parameters._rule = rule
    if reader is None:
        return {}
    values = values_of(reader.frames)
    recorded = {
        name: [values.get((step, "", name), -1.0) for step in range(1, STEPS + 1)] for name in expected
    }
    return {"expected": expected, "recorded": recorded, "skipped": skipped, "lines": reader.lines}
