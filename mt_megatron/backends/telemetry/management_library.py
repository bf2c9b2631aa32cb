"""A vendor's management library: loaded when first asked, started once per process, asked field by field."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mt_megatron.backends.telemetry.readings import Unsupported, Value

T = TypeVar("T")

_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)
"""What both libraries write into an unsigned field that they have no value for."""


class ManagementLibrary:
    """The Python binding of a driver library, and whether this process has started it."""

    def __init__(self, *, module: str, package: str, start: str, stop: str, uninitialized: str) -> None:
        """``module`` is imported when first needed; ``package`` is what pip calls it; ``start`` and
        ``stop`` are its functions, ``uninitialized`` its error code for a library that is not started."""
        self._module = module
        self._package = package
        self._start = start
        self._stop = stop
        self._uninitialized = uninitialized
        self._lock = threading.Lock()
        self._started: Any = None
        self._inherited = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._inherited = self._started is not None
        self._started = None

    def start(self) -> Any | Unsupported:
        """The binding's module, with its library started; or why that cannot be."""
        with self._lock:
            if self._started is not None:
                return self._started
            try:
                binding = importlib.import_module(self._module)
            except ImportError:
                return Unsupported(f"{self._package} is not installed (pip install {self._package})")
            except OSError as error:
                return Unsupported(f"importing {self._module} failed: {_first_line(error)}")
            try:
                if self._inherited:
                    # The parent's session means nothing to the driver in this process.
                    self._inherited = False
                    self._quietly(getattr(binding, self._stop))
                getattr(binding, self._start)()
            except Exception as error:  # noqa: BLE001 - bindings raise OSError and classes of their own.
                return Unsupported(f"the driver library cannot be used: {_first_line(error)}")
            self._started = binding
            return binding

    @staticmethod
    def _quietly(function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception:  # noqa: BLE001 - there may be nothing to stop.
            return

    def ask(self, function: Callable[[Any], T]) -> T | Unsupported:
        """``function(binding)``, or why the driver does not answer.

        A library that somebody else has shut down in the meantime is started again, once.
        """
        for attempt in range(2):
            binding = self.start()
            if isinstance(binding, Unsupported):
                return binding
            try:
                return function(binding)
            except AttributeError as error:
                return Unsupported(f"this version of {self._package} cannot tell: {error}")
            except Exception as error:  # noqa: BLE001 - bindings raise classes of their own.
                code = getattr(error, "value", None)
                if attempt or code is None or code != getattr(binding, self._uninitialized, None):
                    return Unsupported(_first_line(error))
                with self._lock:
                    self._started = None
        raise AssertionError("the second attempt returns")

    def value(self, function: Callable[[Any], float | int], scale: float = 1) -> Value:
        """A number times ``scale``, where the library has one."""
        found = self.ask(function)
        if isinstance(found, Unsupported):
            return found
        if found in _NOT_AVAILABLE:
            return Unsupported("the driver has no value for it")
        return found if scale == 1 else found * scale


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
