"""The rank's side of the test of signals in a real run."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist

from mt_megatron.seams import events
from tests.training.loop_cases import run, start


def asked_on_one_rank(folder: str) -> dict[str, Any]:
    """SIGTERM reaches rank 1 alone, within its third step."""
    start()

    def listener(phase: str, name: str, attrs: Any) -> None:
        if (phase, name, attrs.get("iteration")) == ("begin", "step", 3) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    stop_listening = events.subscribe(listener)
    result = run(f"--save {folder}/asked --train-iters 50 --num-workers 1", folder, "asked")
    stop_listening()
    # Wishes are asked just before the step's reduction, so step 3 itself carries it.
    return {**result, "asked_in": 3}
