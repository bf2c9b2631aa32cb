"""What made a checkpoint: the versions that a reader may have to know."""

from __future__ import annotations

import platform

import numpy as np
import torch

import mt_megatron
from mt_megatron.parallel.job import Job
from mt_megatron.patching.plan import installed_version


def versions(job: Job) -> dict[str, str | None]:
    """Versions of what took part, and the device it ran on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "megatron-core": installed_version("megatron-core"),
        "mt_megatron": mt_megatron.__version__,
        "backend": job.backend.name,
        "device": job.backend.device_name(),
    }
