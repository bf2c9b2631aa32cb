"""A pending send keeps the memory that it reads, also when the schedule lets go of the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..backends.base import Backend
from ..patching.spec import Patch


def _p2p_ops(original: Callable[..., list[Any]], **kwargs: Any) -> list[Any]:
    """Send through another tensor of the same storage.

    With ``overlap_p2p_comm`` the interleaved schedule swaps the ``.data`` of an output
    (``deallocate_pipeline_outputs``) while its send is pending. NCCL's send is ordered before the
    memory is used again; Gloo's holds only the tensor, reads later, and would read freed memory.
    """
    for name in ("tensor_send_prev", "tensor_send_next"):
        if kwargs[name] is not None:
            kwargs[name] = kwargs[name].detach()
    return original(**kwargs)


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="p2p.pending_sends",
            target="megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            kind="wrap",
            feature="collectives",
            backends=frozenset({"cpu"}),
            reason="Gloo reads a sent tensor later; the schedule frees its memory at once",
            body=_p2p_ops,
            digest="0ac270f03d1f127aa96e6f80815a17644993c11c656cf91cd4641a04358f1598",
        )
    ]
