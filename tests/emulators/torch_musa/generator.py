"""The device's random numbers: a stream of their own, apart from the host's.

torch lets no Python code make a ``torch.Generator`` of a PrivateUse1 device, so the default generator
is a CPU generator object that only kernels of the emulated device draw from.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

default = torch.Generator()
_one_at_a_time = threading.RLock()


@contextmanager
def as_host_default() -> Iterator[None]:
    """Inside, CPU kernels that are given no generator draw from the device's."""
    host = torch.default_generator
    with _one_at_a_time:
        before = host.get_state()
        host.set_state(default.get_state())
        try:
            yield
        finally:
            default.set_state(host.get_state())
            host.set_state(before)
