"""How wide an MLP is built: upstream's read one field, and here there are three widths."""

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
