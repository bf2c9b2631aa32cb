"""Every random state of a rank, saved and restored: each rank has its own, whatever its coordinates."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mt_megatron.checkpoint.run_parts import Job
from mt_megatron.errors import CheckpointError

log = logging.getLogger(__name__)


def rng_file_name(rank: int) -> str:
    """Where a rank's random states are, relative to the checkpoint's folder."""
    return f"rng/rank_{rank:05d}.pt"


def capture_rng(job: Job) -> dict[str, Any]:
    """This rank's random states as they are now, for ``torch.save``; other ranks need not take part."""
    from megatron.core import tensor_parallel

    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "device": job.backend.get_rng_state(),
        "device_is_separate": True,
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def load_rng(checkpoint: Path, job: Job) -> dict[str, Any]:
    """Restore what ``capture_rng`` captured; returns what is in this rank's file. Raises ``CheckpointError``
    when it is not there."""
    path = checkpoint / rng_file_name(job.rank)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the random states of rank {job.rank} cannot be read from {path}: {error}. Use another "
            "checkpoint"
        ) from error
    restore_rng(state, job)
    return dict(state)


def restore_rng(state: dict[str, Any], job: Job) -> None:
    """Make what ``capture_rng`` captured this rank's random states again."""
    from megatron.core import tensor_parallel

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if not state.get("device_is_separate") and job.backend.name == "cpu":
        log.warning(
            "the checkpoint was written when the host and the cpu backend's device drew random numbers from "
            "one stream: both go on from its state, and dropout draws what it would have drawn"
        )
    torch.set_rng_state(state["torch"])
    job.backend.set_rng_state(state["device"])
    # A dict of its own: the tracker puts later states into the one that it is given.
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(state["tracker"]))
