"""What a level adds to the events: submodules from ``full`` on, kernels at ``kernel``, the device's times at
every level where there is a device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mt_megatron.backends.base import Backend

from .device_spans import DeviceTime
from .levels import LEVELS, Level
from .module_spans import ModuleHooks
from .profiler import KernelWindows
from .recorder import Recorder


class Depth:
    """Follows a recorder's level. Make it before the recorder starts, close it before the recorder."""

    def __init__(self, recorder: Recorder, backend: Backend, modules: Sequence[nn.Module]) -> None:
        """``modules``: the model's chunks on this rank."""
        self._device = DeviceTime(backend, recorder.add_spans, recorder.note)
        self._hooks = ModuleHooks(modules)
        self._kernels = KernelWindows(backend, recorder.add_spans, recorder.string, recorder.note)
        self._started = False
        recorder.on_level(self._changed)

    def close(self) -> None:
        """Take off the hooks, end the window, write what the device has done."""
        self._changed("off", "off")
        self._kernels.close()
        if self._started:
            self._started = False
            self._device.stop()

    def _changed(self, old: Level, new: Level) -> None:
        if LEVELS.index(new) >= LEVELS.index("full"):
            self._hooks.attach()
        else:
            self._hooks.detach()
        if new == "kernel":
            self._kernels.start()
        else:
            self._kernels.stop()
        if self._started:
            self._device.set_level(new)
        elif new != "off":
            self._started = True
            self._device.start(new)
