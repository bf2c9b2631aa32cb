"""Whose calls are redirected: the modules of Megatron, those that a caller names, and nobody else's."""

from __future__ import annotations

import sys

from mt_megatron.patching.rebind import in_package
from mt_megatron.patching.scope import Scope

PREFIXES = ("megatron",)
"""Dotted module-name prefixes. ``megatron`` is a namespace package: a Megatron-LM checkout on the
path (``megatron.training``) is inside, another library's own ``megatron_x`` is not."""

_scope = Scope(PREFIXES)


def redirect(extra: Scope) -> None:
    """From now on ``extra`` is in scope beside Megatron; an empty one leaves Megatron alone."""
    global _scope
    _scope = Scope(PREFIXES) | extra


def caller_in_scope(depth: int = 2) -> bool:
    """Whether the code ``depth`` Python frames above this function belongs to the scope."""
    return _scope.covers(sys._getframe(depth).f_globals)


def caller_beside_core(depth: int = 2) -> bool:
    """Like ``caller_in_scope``, without ``megatron.core``: where it compares the names of tensor
    types, its literals are exchanged instead."""
    names = sys._getframe(depth).f_globals
    return _scope.covers(names) and not in_package(str(names.get("__name__")), "megatron.core")
