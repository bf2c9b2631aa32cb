"""Places of parameters in the gradient buffer that data-parallel ranks share, by arithmetic alone.

Upstream: ``megatron/core/distributed/param_and_grad_buffer.py`` (``_ParamAndGradBuffer.__init__``), with the
distributed optimizer. One difference: a shared parameter always starts where its bucket starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Elements ``start`` to ``end`` of the buffer, reduced and scattered at once."""

    start: int
    end: int
    """A multiple of every data-parallel rank's share."""

    numel_unpadded: int
    """Elements of the bucket that a checkpoint keeps; its last parameter ends there, or the padding before a
    shared parameter."""

    spans: tuple[tuple[int, int], ...]
    """First element and end of each parameter, in the order of the buffer: the last parameter first."""


def aligned(start: int) -> int:
    """Where a parameter starts that may start at ``start``."""
    return _round_up(start, _PARAMETER_ALIGNMENT)


def buckets_of(
    parameters: Iterable[tuple[int, bool]], data_parallel: int, bucket_size: int | None
) -> list[Bucket]:
    """Buckets of ``parameters``: elements of each, and whether another pipeline stage shares it.

    ``parameters`` come last one first. A bucket is full at ``bucket_size`` elements; None: never. A shared
    parameter has a bucket of its own, so that all stages divide it among data-parallel ranks alike.
    """
    border = math.lcm(data_parallel, _BUCKET_ALIGNMENT)
    found: list[Bucket] = []
    spans: list[tuple[int, int]] = []
    start = end = 0

    def close(filled: int) -> int:
        closed = _round_up(filled, border)
        found.append(
            Bucket(start=start, end=closed, numel_unpadded=filled - start, spans=tuple(spans)),
        )
        spans.clear()
        return closed

    for numel, shared in parameters:
        if shared and spans:
            start = end = close(_round_up(aligned(end), border))
        first = aligned(end)
        end = first + numel
        spans.append((first, end))
        if shared or (bucket_size is not None and end - start >= bucket_size):
            start = end = close(end)
    if spans:
        close(end)
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
