"""Keep the import wrapper out of the tracebacks that end a script."""

from __future__ import annotations

import sys
from types import TracebackType

from ..patching.importlib_bootstrap import is_wrapper


def keep_clean() -> None:
    """From now on an uncaught exception is shown as if imports were not watched."""
    shown = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        clean(value)
        shown(kind, value, value.__traceback__ if trace is not None else None)

    sys.excepthook = excepthook


def clean(error: BaseException | None) -> None:
    """Take the wrapper's frames out of ``error`` and of what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _without_wrapper(error.__traceback__)
        error = error.__cause__ or error.__context__


def _without_wrapper(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and is_wrapper(trace.tb_frame.f_code):
        trace = trace.tb_next
    at = trace
    while at is not None:
        while at.tb_next is not None and is_wrapper(at.tb_next.tb_frame.f_code):
            at.tb_next = at.tb_next.tb_next
        at = at.tb_next
    return trace
