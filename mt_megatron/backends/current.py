"""The backend in force, for packages below the session that applies it.

The session provides the function that gives it: an import of the session here would be a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mt_megatron.errors import PatchError

if TYPE_CHECKING:
    import torch

    from mt_megatron.backends.base import Backend

_source: Callable[[], Backend] | None = None


def provide(source: Callable[[], Backend]) -> None:
    """Make ``source`` what ``current_backend`` asks."""
    global _source
    _source = source


def current_backend() -> Backend:
    """The backend in force. Raises PatchError without ``patch()``."""
    if _source is None:
        raise PatchError("nothing is patched: call mt_megatron.patch() first")
    return _source()


def current_device() -> torch.device:
    """Current device of the calling thread. Raises PatchError without ``patch()``."""
    backend = current_backend()
    return backend.device(backend.current_device())


def backend_or_none() -> Backend | None:
    """The backend in force; None without ``patch()``."""
    try:
        return current_backend()
    except PatchError:
        return None
