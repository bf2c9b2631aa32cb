"""The ranks' side: a training with a live page, until somebody has seen enough of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.config.parse import load_config
from mt_megatron.training import loop
from mt_megatron.training.loop import train
from tests.training.loop_cases import MODEL, TRAINING, start

LAYERS, HEADS, EXPERTS, TOP_K, SEQUENCE, BATCH, INTERVAL = 4, 4, 4, 2, 32, 8, 5

FLAGS = (
    f"{MODEL} {TRAINING} --num-moe-experts {EXPERTS} --moe-router-topk {TOP_K} --moe-ffn-hidden-size 32 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2 --tokenizer-type ByteLevelTokenizer "
    "--train-iters 200000 --eval-iters 0 "
    f"--scope live --scope-interval {INTERVAL} --lr 1e-3"
)
WATCHED = (
    "attention@decoder.layers.*:tokens=0-31",
    f"logits@output_layer:samples=0-1:tokens=0-{SEQUENCE - 1}",
    f"logits@decoder.layers.*:samples=0-1:tokens=0-{SEQUENCE - 1}",
    "residual@decoder.layers.*",
    "router@decoder.layers.1",
)


def trained_until_told(folder: str) -> dict[str, Any]:
    """Train on both ranks until the file ``FOLDER/enough`` is there."""
    start()
    take = loop.Steps.take

    def at_ease(self: Any, *given: Any, **named: Any) -> Any:
        # Browser, server and sidecar share the machine with two ranks that would never rest.
        if self.progress.iteration > 20:
            time.sleep(0.25)
        return take(self, *given, **named)

    loop.Steps.take = at_ease  # type: ignore[method-assign]
    if dist.get_rank() == 0:
        threading.Thread(target=_stop_when_told, args=(Path(folder) / "enough",), daemon=True).start()
    flags = [*FLAGS.split(), "--save", f"{folder}/run", "--scope-watch", *WATCHED]
    outcome = train(load_config(flags))
    return {"iteration": outcome.progress.iteration, "finished": outcome.finished}


def _stop_when_told(path: Path) -> None:
    waits = threading.Event()
    while not path.exists():
        waits.wait(0.1)
    os.kill(os.getpid(), signal.SIGTERM)  # the run ends after its step, on both ranks
