"""Tokens by a SentencePiece ``.model`` file, under Megatron-LM's names for its two ways."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mt_megatron.errors import DataError


class SentencePieceTokenizer:
    """Text to token ids and back, from a SentencePiece model.

    ``begin=False`` is Megatron-LM's GPTSentencePieceTokenizer; ``begin=True`` its Llama2Tokenizer,
    which puts the model's beginning-of-sequence token before each document. The model's
    end-of-sequence token ends a document.
    """

    def __init__(self, path: Path, *, begin: bool = False) -> None:
        """Read ``path``. Raises ``DataError`` when sentencepiece is not installed, the file cannot be
        read or is no SentencePiece model, or the model lacks a token that is needed."""
        try:
            import sentencepiece
        except ImportError as error:
            raise DataError(
                f"reading {path} needs the package sentencepiece, which is not installed; install it with: "
                'pip install "mt_megatron[data]"'
            ) from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error.strerror}; give a SentencePiece .model file"
            ) from error
        self._impl: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._impl.LoadFromSerializedProto(content)
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"{path} is no SentencePiece model ({error}); expected the .model file that SentencePiece's "
                "trainer wrote"
            ) from error
        self.path = path
        self.vocab_size: int = self._impl.vocab_size()
        self.eod: int = self._impl.eos_id()
        self._begin: list[int] = [self._impl.bos_id()] if begin else []
        for name, index in (("end", self.eod), *(("beginning", first) for first in self._begin)):
            if index < 0:
                raise DataError(
                    f"{path} has no {name}-of-sequence token; expected one, which marks the borders of "
                    "documents. Use a model trained with it"
                )
        self.identity = hashlib.sha256(content).hexdigest() + ("-begin" if begin else "")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without any end-of-document token."""
        ids: list[int] = self._impl.encode(text)
        return self._begin + ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text, on one thread."""
        return [self._begin + ids for ids in self._impl.encode(list(texts), num_threads=1)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; control tokens are left out."""
        text: str = self._impl.decode([int(i) for i in ids])
        return text

    def vocabulary(self) -> dict[str, int]:
        """Token text -> id."""
        return {self._impl.id_to_piece(i): i for i in range(self.vocab_size)}
