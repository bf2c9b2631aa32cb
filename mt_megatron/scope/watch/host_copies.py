"""Copies of small device tensors on the host, made while the device goes on."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mt_megatron.backends.base import Backend

Arrays = Callable[[], "list[np.ndarray[Any, Any]]"]
"""Waits for the copies and returns them."""

_ALIGNED = 16
"""Bytes from one array to the next within a mapping are a multiple of this."""


class Copier:
    """Copies to pinned memory behind the work queued so far; on a CPU at once, to memory of their own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def copy(self, tensors: Sequence[Tensor]) -> Arrays:
        """Begin copying ``tensors``; what is returned waits for them, in any thread."""
        if self._backend.device_type == "cpu":
            arrays = _mapped([each.detach().numpy() for each in tensors])
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


def _mapped(arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Copies of ``arrays`` in one mapping, which goes back to the system with the last of them.

    In the heap, arrays that wait for a sidecar lie between the tensors of later steps, whose memory then
    cannot be used again as a whole: it grows by many times the size of what waits.
    """
    places, size = [], 0
    for each in arrays:
        places.append(size)
        size += -(-each.nbytes // _ALIGNED) * _ALIGNED
    if size == 0:
        return arrays
    memory = mmap.mmap(-1, size)
    copies = []
    for each, place in zip(arrays, places, strict=True):
        copy = np.frombuffer(memory, each.dtype, each.size, place).reshape(each.shape)
        np.copyto(copy, each)
        copies.append(copy)
    return copies
