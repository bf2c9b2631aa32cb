"""How many micro-batches the loader's workers have ready: near none, the training waits for its data."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

# Replaced and never changed: another thread may be counting while a loader is added.
_iterators: tuple[weakref.ref[Any], ...] = ()


def watched(iterator: Iterator[Any]) -> Iterator[Any]:
    """Count what ``iterator`` of a ``DataLoader`` has ready for as long as it is used."""
    global _iterators
    _iterators = (*(each for each in _iterators if each() is not None), weakref.ref(iterator))
    return iterator


def micro_batches_ready() -> int | None:
    """Micro-batches that lie ready in all loaders together; None without workers, which keep none ready.

    Any thread. Reads the size of torch's own queue (``_data_queue``, the same in torch 2.7 and 2.13).
    """
    sizes = []
    for reference in _iterators:
        queue = getattr(reference(), "_data_queue", None)
        if queue is not None:
            sizes.append(int(queue.qsize()))
    return sum(sizes) if sizes else None
