"""Whose calls are redirected: the modules of Megatron, and nobody else's."""

from __future__ import annotations

import sys

PREFIXES = ("megatron",)
"""Dotted module-name prefixes. ``megatron`` is a namespace package: a Megatron-LM checkout on the
path (``megatron.training``) is inside, another library's own ``megatron_x`` is not."""


def in_scope(module_name: str | None) -> bool:
    """Whether a module of this name sees the active backend as its CUDA."""
    return module_name is not None and (
        module_name in PREFIXES or module_name.startswith(tuple(p + "." for p in PREFIXES))
    )


def caller_in_scope(depth: int = 2) -> bool:
    """Whether the code ``depth`` Python frames above this function belongs to the scope."""
    return in_scope(sys._getframe(depth).f_globals.get("__name__"))
