"""Copies of small device tensors on the host, made while the device goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mt_megatron.backends.base import Backend

Arrays = Callable[[], "list[np.ndarray[Any, Any]]"]
"""Waits for the copies and returns them."""


class Copier:
    """Copies to pinned memory behind the work queued so far; on a CPU nothing is copied."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def copy(self, tensors: Sequence[Tensor]) -> Arrays:
        """Begin copying ``tensors``; what is returned waits for them, in any thread."""
        if self._backend.device_type == "cpu":
            arrays = [each.detach().numpy() for each in tensors]
            return lambda: arrays
        pinned = self._backend.pins_host_memory()
        hosts = []
        for each in tensors:
            host = torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned)
            host.copy_(each.detach(), non_blocking=pinned)
            hosts.append(host)
        event = self._backend.timed_event() if pinned else None
        if event is not None:
            event.record()
        # The device's tensors live until the copies are there.
        kept = list(tensors)

        def arrays_then() -> list[np.ndarray[Any, Any]]:
            if event is not None:
                event.synchronize()  # type: ignore[attr-defined]
            kept.clear()
            return [host.numpy() for host in hosts]

        return arrays_then
