"""Text of single tokens, by the tokenizer that the recording names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mt_megatron.errors import DataError

Words = Callable[[int], str]


def words_of(tokenizer: Any) -> Words | None:
    """Token id -> its text in the middle of a sentence; of a token without text its name.

    ``tokenizer``: type, model (path of its file or None) and identity, as ranks say them. None where there
    is no such file any more, where its ids mean something else by now, and for ids without texts.
    """
    if not isinstance(tokenizer, dict):
        return None
    kind, model, identity = (tokenizer.get(key) for key in ("type", "model", "identity"))
    if not isinstance(kind, str) or not isinstance(model, str | None):
        return None
    return _opened(kind, model, identity)


@functools.lru_cache(maxsize=4)
def _opened(kind: str, model: str | None, identity: str) -> Words | None:
    # Not earlier: most pages show no tokens, and reading a vocabulary takes a moment.
    from mt_megatron.data.loader.tokenizer import open_tokenizer

    try:
        found: Any = open_tokenizer(kind, model)
        if found.identity != identity:
            return None
    except (DataError, OSError):
        return None  # also NullTokenizer, whose ids are all there is
    # A tokenizer may drop the space that a text begins with: each token is shown after another one.
    before = found.encode("a")[-1]
    head = found.decode([before])
    names = {index: name for name, index in found.vocabulary().items()}

    @functools.cache
    def word(index: int) -> str:
        if index not in names:
            return f"#{index}"  # the vocabulary is padded
        text: str = found.decode([before, index])
        text = text[len(head) :] if text.startswith(head) else found.decode([index])
        return text or names[index]

    return word
