"""Threads of a rank, on the rank's device: a runtime gives each new thread device 0."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mt_megatron.backends.current import backend_or_none

if TYPE_CHECKING:
    from mt_megatron.backends.base import Backend


class RankThread(threading.Thread):
    """A thread whose current device is that of the thread that starts it.

    On device 0 it would read another rank's telemetry, and its first call of the runtime would make a context
    there (0.5 GiB on a GPU). Takes what ``threading.Thread`` takes. Where nothing is patched, or the process
    uses no device so far, no device is set.
    """

    _device: tuple[Backend, int] | None = None

    def start(self) -> None:
        self._device = _device_in_use()
        super().start()

    def run(self) -> None:
        if self._device is not None:
            backend, index = self._device
            backend.set_device(index)
        super().run()


def _device_in_use() -> tuple[Backend, int] | None:
    backend = backend_or_none()
    if backend is None:
        return None
    import torch  # here, since sidecars do without it

    # Asking an unused runtime for its device initialises it, after which no child can be forked that uses it.
    module = torch.get_device_module(backend.device_type)
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    return backend, backend.current_device()
