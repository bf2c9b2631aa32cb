"""Keep the import wrapper and the import hook out of the tracebacks that end a script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

from mt_megatron.patching.hooks import is_hook
from mt_megatron.patching.importlib_bootstrap import is_wrapper

_NEEDED_BY_MEGATRON_LM = ("six", "regex")
"""Imported by Megatron-LM's tokenizers whatever tokenizer is chosen; Megatron-Core does not need them."""


def keep_clean() -> None:
    """From now on an uncaught exception is shown as if imports were not watched."""
    shown = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        said = advice(value)
        clean(value)
        shown(kind, value, value.__traceback__ if trace is not None else None)
        if said is not None:
            print(f"mt-megatron: {said}", file=sys.stderr)

    sys.excepthook = excepthook


def advice(error: BaseException) -> str | None:
    """What to do about an error by which Megatron-LM's own source ends when something optional is absent."""
    names = (str(frame.f_globals.get("__name__")) for frame in _frames(error.__traceback__))
    if not any(name.startswith("megatron.") for name in names):
        return None
    if isinstance(error, ModuleNotFoundError) and error.name in _NEEDED_BY_MEGATRON_LM:
        return (
            f"Megatron-LM needs the package {error.name}: pip install 'mt_megatron[megatron-lm]' "
            f"(or pip install {' '.join(_NEEDED_BY_MEGATRON_LM)})"
        )
    if isinstance(error, NameError) and error.name is not None and error.name.startswith("TE"):
        return "Megatron-LM's default needs Transformer Engine, which is not here: --transformer-impl local"
    return None


def clean(error: BaseException | None) -> None:
    """Take the frames of the wrapper and the hook out of ``error`` and of what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _without_ours(error.__traceback__)
        error = error.__cause__ or error.__context__


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_hook(code):
            # Python hides the frames of its import system up to the module's own, and stops at the hook's.
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib"):
                kept.pop()
        elif not is_wrapper(code):
            kept.append(trace)
        trace = trace.tb_next
    for this, following in zip(kept, [*kept[1:], None], strict=True):
        this.tb_next = following
    return kept[0] if kept else None
