"""CUDA without a device: fake tensors, fake process groups, and a stand-in of torch.cuda that records."""

from __future__ import annotations

import pytest
import torch

needs_a_cpu_build = pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="a torch with CUDA built in asks for the driver, also for fake tensors: this needs a CPU build",
)
