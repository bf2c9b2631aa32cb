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
        # Tensors of one dtype go in one copy: a step has hundreds of small ones, and each copy takes time.
        kept, hosts = [], dict[torch.dtype, Tensor]()
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            joined = torch.cat([each.detach().reshape(-1) for each in tensors if each.dtype is dtype])
            host = torch.empty(joined.shape, dtype=dtype, pin_memory=pinned)
            host.copy_(joined, non_blocking=pinned)
            kept.append(joined)
            hosts[dtype] = host
        about = [(each.dtype, each.shape, each.numel()) for each in tensors]
        event = self._backend.timed_event() if pinned else None
        if event is not None:
            event.record()

        def arrays_then() -> list[np.ndarray[Any, Any]]:
            if event is not None:
                event.synchronize()  # type: ignore[attr-defined]
            # The device's tensors live until the copies are there.
            kept.clear()
            arrays, places = [], dict.fromkeys(hosts, 0)
            for dtype, shape, count in about:
                first = places[dtype]
                places[dtype] = first + count
                arrays.append(hosts[dtype][first : first + count].view(shape).numpy())
            return arrays

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
