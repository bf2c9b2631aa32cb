"""The ranks' side of the tests of the watchdog in a real run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from mt_megatron.checkpoint import save
from mt_megatron.training import loop, steps
from mt_megatron.training.health.watchdog import Watchdog
from tests.training.loop_cases import run, start


def data_that_does_not_come(folder: str) -> dict[str, Any]:
    """The data of rank 1 stops coming in the third step."""
    start()
    original = steps.train_batches

    def slow(*args: Any, **kwargs: Any) -> Any:
        for number, batch in enumerate(original(*args, **kwargs)):
            if dist.get_rank() == 1 and number == 4:
                time.sleep(600)
            yield batch

    steps.train_batches = slow
    return run("--watchdog-seconds 5", folder, "stuck")


def limits_in_a_run(folder: str) -> dict[str, list[float]]:
    """Seconds that the watchdog grants in each part of a run, with 300 in a step and 60 as the timeout."""
    start()
    found: dict[str, list[float]] = {"step": [], "validation": [], "saving": []}
    made: list[Watchdog] = []

    @contextmanager
    def watched(limit: float, **options: Any) -> Iterator[Watchdog]:
        made.append(Watchdog(limit=limit, **options))
        yield made[0]

    def noting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            limit = made[0]._state[2]
            found[name].append(-1.0 if math.isinf(limit) else limit)
            return original(*args, **kwargs)

        return call

    loop.watched = watched
    steps.train_step = noting("step", steps.train_step)
    loop.evaluate = noting("validation", loop.evaluate)
    save.Save.begin = noting("saving", save.Save.begin)
    save.Save._wrote = noting("saving", save.Save._wrote)
    run(
        f"--distributed-timeout-minutes 1 --train-iters 3 --eval-interval 1 --save {folder}/saved "
        "--save-interval 1",
        folder,
        "limits",
    )
    return found
