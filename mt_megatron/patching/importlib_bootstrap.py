"""Let ``import`` statements of some modules answer with a view, in functions too.

A name that a module bound while it was imported can be rebound afterwards; ``import x`` inside of a
function binds anew on every call, and a script's own statements run before anybody could rebind
them. So ``builtins.__import__`` gets a wrapper for as long as somebody wants to see statements. For
everybody else it costs a dict lookup on each statement, and they get what they would have got.

The file has its name because ``warnings`` looks through frames of files that are named so: a warning
about an import names the statement, and not the wrapper.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, Protocol


class Viewer(Protocol):
    """Who answers import statements."""

    def see(
        self, module: ModuleType, names: Mapping[str, Any], wanted: Sequence[str], *, in_function: bool
    ) -> Any:
        """What a statement of the module with the ``__dict__`` ``names`` gets instead of ``module``
        (which may be ``module``); ``wanted`` are the names after ``import`` in a ``from`` statement."""


_changing = threading.Lock()
_viewers: tuple[Viewer, ...] = ()
_real: Any = None
_inside = False
"""Whether ours is somewhere in the chain of wrappers, where somebody else has put another around it."""


def watch(viewer: Viewer) -> None:
    """From now on ``viewer`` is asked; twice is once."""
    global _viewers, _real, _inside
    with _changing:
        if any(one is viewer for one in _viewers):
            return
        if not _inside or builtins.__import__ is _real:
            _real, _inside = builtins.__import__, True
            builtins.__import__ = _import
        _viewers = (*_viewers, viewer)


def unwatch(viewer: Viewer) -> None:
    """Ask ``viewer`` no more; the last one takes the wrapper away. Where somebody else has put a
    wrapper around ours, it stays and answers nothing."""
    global _viewers, _inside
    with _changing:
        _viewers = tuple(one for one in _viewers if one is not viewer)
        if not _viewers and builtins.__import__ is _import:
            builtins.__import__, _inside = _real, False


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    module = _real(name, globals, locals, fromlist, level)
    # Our own modules see the truth, whoever watches; some of their functions run often.
    if globals is None or str(globals.get("__name__")).startswith("mt_megatron."):
        return module
    # A function's statements pass no locals.
    viewers, in_function = _viewers, locals is None
    for viewer in viewers:
        module = viewer.see(module, globals, fromlist or (), in_function=in_function)
    if viewers is not _viewers:  # one of them has brought another
        for viewer in _viewers:
            if viewer not in viewers:
                module = viewer.see(module, globals, fromlist or (), in_function=in_function)
    return module


def is_wrapper(code: CodeType) -> bool:
    """Whether a frame with this code is the wrapper's, for who shows tracebacks."""
    return code is _import.__code__
