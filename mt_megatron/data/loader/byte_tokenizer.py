"""Byte-level tokens: 256 bytes and the end of a document, without any file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_BYTES = 256


class ByteLevelTokenizer:
    """Every UTF-8 byte is a token, 0 to 255; 256 ends a document.

    Needs no training and no file, has no unknown text, and makes about four times as many tokens of
    English as a byte-pair encoding does.
    """

    vocab_size: int = _BYTES + 1
    """257: the bytes and the end of a document."""

    eod: int = _BYTES
    """Id that ends a document."""

    identity: str = "byte-level-257"
    """The same wherever it is used: there is nothing to choose."""

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``, without any end-of-document token."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """``encode`` of each text, uint8."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; ends of documents are left out, broken characters become U+FFFD."""
        return bytes(i for i in ids if i < _BYTES).decode(errors="replace")

    def vocabulary(self) -> dict[str, int]:
        """A byte's token is named ``<0xNN>``."""
        return {f"<0x{i:02X}>": i for i in range(_BYTES)} | {"<|endoftext|>": _BYTES}
