"""Tensors of a device, on their way through pinned host memory and streams of the transport's own.

A post copies to the host on a side stream behind the work that is queued on the current one, and does not
wait; the edge's thread waits for the copy's event. A receive copies from pinned memory on another side
stream, behind which the current one is put. torch keeps pinned memory for the next message.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mt_megatron.backends.base import Backend
from mt_megatron.comm.shared_memory.tensors import Unwritten, in_rows, is_part


class Staged:
    """A copy to the host that is under way; keeps its source, whose memory must not be given to others."""

    def __init__(self, source: Tensor, host: Tensor, event: Any, unwritten: Unwritten | None = None) -> None:
        """``unwritten``: of ``source``, where work that is queued later may write to it too soon."""
        self.unwritten = unwritten
        self._source: Tensor | None = source
        self._host = host
        self._event = event

    def wait(self) -> Tensor:
        """The copy in host memory."""
        if self._event is not None:
            self._event.synchronize()
        self._source = None
        return self._host


class Staging:
    """Copies between ``device`` and the host. On the CPU there is nothing to copy."""

    def __init__(self, device: torch.device, backend: Backend | None) -> None:
        """``backend``: of ``device``; None with the CPU."""
        self.device = device
        self._backend = backend
        self._pins = backend is not None and backend.pins_host_memory()
        self._outwards: Any = None
        self._inwards: Any = None
        self._lock = threading.Lock()

    def to_host(self, tensor: Tensor) -> Staged:
        """Start copying ``tensor`` behind the work on the current stream."""
        source = in_rows(tensor)
        with self._lock:
            if self._outwards is None and self._backend is not None:
                self._outwards = self._backend.new_stream()
        host = self.host_memory(source.shape, source.dtype)
        stream = self._outwards
        if stream is None or not self._pins:
            host.copy_(source)
            return Staged(source, host, None)
        module = torch.get_device_module(source.device)
        stream.wait_stream(module.current_stream())
        with _on(module, stream):
            host.copy_(source, non_blocking=True)
            event = module.Event()
            event.record(stream)
        return Staged(source, host, event, None if is_part(source) else Unwritten(source, tensor))

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host for a tensor of the device: pinned where that is possible."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=self._pins)

    def to_device(self, host: Tensor, out: Tensor | None) -> Tensor:
        """``host`` on the device, in ``out`` if given; complete for what the current stream does next."""
        target = out if out is not None else torch.empty(host.shape, dtype=host.dtype, device=self.device)
        with self._lock:
            if self._inwards is None and self._backend is not None:
                self._inwards = self._backend.new_stream()
        stream = self._inwards
        if stream is None or not self._pins:
            target.copy_(host)
            return target
        module = torch.get_device_module(self.device)
        current = module.current_stream()
        stream.wait_stream(current)  # Its memory may still be in use by work queued there.
        with _on(module, stream):
            target.copy_(host, non_blocking=True)
        # What reads it, and whoever gets its memory next, comes behind the copy on the current stream.
        current.wait_stream(stream)
        return target


def _on(module: Any, stream: Any) -> AbstractContextManager[Any]:
    make = getattr(module, "stream", None)
    return nullcontext() if make is None else make(stream)
