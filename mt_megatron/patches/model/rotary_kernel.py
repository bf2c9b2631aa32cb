"""Rotary positions with half of the passes over queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def _apply_rotary_pos_emb_bshd(t: Any, freqs: Any, rotary_interleaved: bool = False) -> Any:
    return _rotate()(t, freqs, rotary_interleaved)


@cache
def _rotate() -> Callable[..., Any]:
    """Imported late, once: a statement in the function itself would cost each call some microseconds."""
    from mt_megatron.layers.rope.rotation import rotate

    return rotate


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="rotary.bshd",
            target="megatron.core.models.common.embeddings.rotary_pos_embedding:apply_rotary_pos_emb_bshd",
            kind="replace",
            feature="device",
            reason="upstream's expression reads and writes queries and keys six times in each direction",
            body=_apply_rotary_pos_emb_bshd,
            digest="4af8afc3fbef89b2d9863492cced98d06e5a69289fa58b2afa9d4ccfaa7e0cb6",
        )
    ]
