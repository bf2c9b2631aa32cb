"""The backend of Moore Threads GPUs.

backend    the ``Backend`` on torch_musa; pinned host memory
namespace  what Megatron's modules see as ``torch.cuda``
cards      abilities of each card, in one table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import MusaBackend as MusaBackend


def __getattr__(name: str) -> Any:
    """``MusaBackend`` on first use: ``cards`` is read where torch may be missing or slow to import."""
    if name == "MusaBackend":
        from .backend import MusaBackend

        return MusaBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
