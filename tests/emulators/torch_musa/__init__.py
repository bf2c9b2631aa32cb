"""An EMULATOR of torch_musa on the CPU, for tests: it registers PrivateUse1 as ``musa`` and offers the
public names of torch_musa 2.7.1 and no others.

A tensor on it is an ordinary ``torch.Tensor`` of device ``musa:0`` whose storage lies in host memory;
every kernel runs on a CPU tensor over the same memory (see ``kernels``). So views, in-place
operations, ``.data =`` and storages behave as on a device. What it cannot show: speed, rounding of
the real kernels, asynchrony, several devices in one process, the driver, MCCL.

It needs a torch that lets Python code register a PrivateUse1 device (2.10 or newer).
"""

from __future__ import annotations

import torch

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as _register
except ImportError as error:
    raise ImportError(
        "the torch_musa emulator needs a torch with Python-registered PrivateUse1 devices; "
        f"found {torch.__version__}"
    ) from error

from . import surface

__version__ = "2.7.1+emulator"


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> object:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return surface.is_initialized()

    def is_built(self) -> bool:
        return True


# torch keeps no reference of its own to them.
_registered = (_Hooks(), _Guard())
_register("musa", backend_module=surface.module, hook=_registered[0], device_guard=_registered[1])

from . import kernels, mccl, optim  # noqa: E402  (they need the device's name)

kernels.register()
mccl.register()
surface.extend_torch()

__all__ = ["optim"]
