"""Width of an MLP: upstream reads one field; dense, routed and shared experts have three."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def of_width(config: Any, size: int | None) -> Iterator[None]:
    """While an MLP is built: ``config.ffn_hidden_size`` is ``size``. None changes nothing."""
    if size is None:
        yield
        return
    before, config.ffn_hidden_size = config.ffn_hidden_size, size
    try:
        yield
    finally:
        config.ffn_hidden_size = before
