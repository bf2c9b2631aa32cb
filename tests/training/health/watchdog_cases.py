"""The ranks' side of the tests of the watchdog in a real run."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from mt_megatron.training import steps
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
