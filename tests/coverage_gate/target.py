"""The backend that the named tests of this process run on, and a ``torch`` that makes tensors on it.

``MT_MEGATRON_TEST_BACKEND`` says which: ``cpu`` (the default), ``musa`` (a device or its emulator) or
``cuda``. The cases import ``torch`` from here, so that ``torch.arange(3)`` in a case is a tensor of the
device under test; the rest of the process keeps torch as it is.
"""

from __future__ import annotations

import os
from typing import Any

import torch as _torch

from mt_megatron.backends.namespace import ModuleView

BACKEND = os.environ.get("MT_MEGATRON_TEST_BACKEND", "cpu")
DEVICE = {"cpu": "cpu", "musa": "musa", "cuda": "cuda"}[BACKEND]
COLLECTIVE = {"cpu": "gloo", "musa": "mccl", "cuda": "nccl"}[BACKEND]

_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros",
)  # fmt: skip


def _on_device(name: str) -> Any:
    factory = getattr(_torch, name)

    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            return factory(*args, **kwargs)
        if name.startswith("rand") and "generator" not in kwargs:
            return factory(*args, **kwargs, device=DEVICE)
        # Made on the host, with its generator: the same numbers on every device.
        requires_grad = kwargs.pop("requires_grad", False)
        return factory(*args, **kwargs).to(DEVICE).requires_grad_(requires_grad)

    return make


torch: Any = _torch if BACKEND == "cpu" else ModuleView(_torch, {n: _on_device(n) for n in _FACTORIES})
