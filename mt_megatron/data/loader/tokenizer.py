"""Tokenizers by the name of their type; Hugging Face's ``tokenizer.json``, and one trained here."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mt_megatron.config.schema import DataConfig
from mt_megatron.data.loader.sentencepiece_tokenizer import SentencePieceTokenizer
from mt_megatron.errors import DataError

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


TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)
"""The values of ``--tokenizer-type``; all but ByteLevelTokenizer are Megatron-LM's names."""

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
_BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""Padding is token 0, since Megatron-Core pads masks with its id."""

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Names of the files of a published tokenizer. ``Tokenizer`` reads ``tokenizer.json`` and
``tokenizer_config.json``; the others belong to a published model."""


class TokenizerLike(Protocol):
    """What datasets need to know of a tokenizer."""

    vocab_size: int
    """Ids run from 0 to ``vocab_size - 1``, the end of a document included."""

    eod: int
    """Id that ends a document."""

    identity: str
    """Differs when the ids mean something else; part of the index cache's key."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without any end-of-document token."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | npt.NDArray[Any]]:
        """``encode`` of each text."""

    def vocabulary(self) -> dict[str, int]:
        """Token text -> id."""


class Tokenizer:
    """Text to token ids and back, from a ``tokenizer.json`` or a folder that holds one.

    In a folder, ``tokenizer_config.json`` says which token ends a document (``eos_token``).
    """

    def __init__(
        self,
        path: Path,
        *,
        eod_token: str | None = None,
        include_special_tokens: bool = False,
        split_special_tokens: bool = True,
    ) -> None:
        """Read ``path``; ``eod_token`` names the end-of-document token when it is none of the
        usual ones.

        ``include_special_tokens``: the file's post-processor puts its tokens, such as the beginning of a
        sequence, around each text. ``split_special_tokens``: the name of a special token inside a text is
        plain text, so that no document can forge its own end. Megatron-LM's HuggingFaceTokenizer includes
        and does not split. Raises ``DataError`` when the file or the token is missing.
        """
        self._include = include_special_tokens
        self.beside: tuple[Path, ...] = ()
        """Further ``TOKENIZER_FILES`` of a folder; none where a file was given."""

        if path.is_dir():
            eod_token = eod_token or _configured_end(path / "tokenizer_config.json")
            path = path / "tokenizer.json"
            further = (path.with_name(name) for name in TOKENIZER_FILES if name != path.name)
            self.beside = tuple(each for each in further if each.is_file())
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error.strerror}; give a tokenizer.json"
            ) from error
        try:
            self._impl = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises a bare Exception for malformed files
            raise DataError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from error
        asks = self._impl.truncation is not None or self._impl.padding is not None
        self.truncation_and_padding = "not applied" if asks else None
        """None where the file asks for neither. Earlier versions applied them: data records which did not."""

        # A file's truncation would cut documents, its padding would add tokens to them.
        self._impl.no_truncation()
        self._impl.no_padding()
        self.path = path
        self.identity = hashlib.sha256(content).hexdigest()
        # Ids with gaps between them reach beyond the number of tokens.
        largest = max(self.vocabulary().values(), default=-1)
        self.vocab_size: int = max(self._impl.get_vocab_size(with_added_tokens=True), largest + 1)
        self.eod_token, self.eod = self._find_end(eod_token)
        self._impl.encode_special_tokens = split_special_tokens
        special = [each.content for each in self._impl.get_added_tokens_decoder().values() if each.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without any end-of-document token that the file does not add itself."""
        ids: list[int] = self._impl.encode(text, add_special_tokens=self._include).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text, in parallel."""
        return [e.ids for e in self._impl.encode_batch_fast(list(texts), add_special_tokens=self._include)]

    def special_tokens_in(self, text: str) -> int:
        """How many special tokens ``text`` names, whether they are split or not."""
        return len(self._special.findall(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; end-of-document tokens are kept."""
        text: str = self._impl.decode(list(ids), skip_special_tokens=False)
        return text

    def vocabulary(self) -> dict[str, int]:
        """Token text -> id, added tokens included."""
        vocabulary: dict[str, int] = self._impl.get_vocab(with_added_tokens=True)
        return vocabulary

    def _find_end(self, eod_token: str | None) -> tuple[str, int]:
        for candidate in (eod_token,) if eod_token is not None else _KNOWN_ENDS:
            index = self._impl.token_to_id(candidate)
            if index is not None:
                return candidate, int(index)
        expected = repr(eod_token) if eod_token is not None else "one of " + ", ".join(map(repr, _KNOWN_ENDS))
        raise DataError(f"{self.path} has no end-of-document token; expected {expected}")


class NullTokenizer:
    """``vocab_size`` ids without text, the last of which ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.identity = f"null-{vocab_size}"

    def encode(self, text: str) -> list[int]:
        """Numbers separated by blanks. Raises ``DataError`` for anything else."""
        return [self._number(word) for word in text.split()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text."""
        return [self.encode(text) for text in texts]

    def vocabulary(self) -> dict[str, int]:
        """Every id under its own number."""
        return {str(index): index for index in range(self.vocab_size)}

    def _number(self, word: str) -> int:
        if word.isascii() and word.isdigit() and int(word) < self.vocab_size:
            return int(word)
        raise DataError(
            f"found {word[:40]!r}; NullTokenizer reads numbers from 0 to {self.vocab_size - 1}. Name the "
            "text's tokenizer with --tokenizer-type"
        )


def load_tokenizer(data: DataConfig, *, vocab_size: int | None = None) -> TokenizerLike:
    """The tokenizer that ``data`` names; ``vocab_size`` is the model's, used by NullTokenizer.

    Raises ``DataError`` when its file or its size is missing, or when the model's vocabulary is
    too small for it.
    """
    tokenizer = open_tokenizer(data.tokenizer_type, data.tokenizer_model, vocab_size=vocab_size)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"the model has vocab_size={vocab_size}, and {data.tokenizer_model or data.tokenizer_type} has "
            f"{tokenizer.vocab_size} tokens; expected at least as many: raise --vocab-size or leave it out; "
            "for a published model make the data with its tokenizer (mt-megatron prepare --tokenizer FOLDER)"
        )
    return tokenizer


def open_tokenizer(
    kind: str,
    model: str | None,
    *,
    vocab_size: int | None = None,
    include_special_tokens: bool = False,
    split_special_tokens: bool = True,
) -> TokenizerLike:
    """The tokenizer ``kind`` (one of ``TOKENIZER_TYPES``) with the file ``model``, where it has one. Special
    tokens are those of ``Tokenizer``; the other kinds have no choice.

    Raises ``DataError`` when the kind is none of these, or its file or its size is missing.
    """
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise DataError("NullTokenizer has no file to know its size from; give --vocab-size")
        return NullTokenizer(vocab_size)
    if kind == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if kind not in TOKENIZER_TYPES:
        raise DataError(f"found tokenizer type {kind!r}; expected one of {', '.join(TOKENIZER_TYPES)}")
    if model is None:
        wanted = "the tokenizer.json" if kind == "HuggingFaceTokenizer" else "the SentencePiece .model file"
        raise DataError(f"found no tokenizer; give --tokenizer-model PATH of {wanted} the data was made with")
    if kind == "HuggingFaceTokenizer":
        return Tokenizer(
            Path(model),
            include_special_tokens=include_special_tokens,
            split_special_tokens=split_special_tokens,
        )
    return SentencePieceTokenizer(Path(model), begin=kind == "Llama2Tokenizer")


def _configured_end(path: Path) -> str | None:
    """``eos_token`` of a ``tokenizer_config.json``, if there is such a file and it says one."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    token = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, output: Path, wordpiece: bool = False
) -> Tokenizer:
    """Train a byte-level BPE of exactly ``vocab_size`` tokens, the end-of-document token among
    them, and write it to ``output``. The same texts in the same order give the same file.

    ``wordpiece``: lower-case WordPiece with BERT's five special tokens and its split into words instead.

    Raises ``DataError`` when ``vocab_size`` is smaller than the alphabet or the texts are too
    small to yield that many tokens.
    """
    smallest = _BYTES + 1
    if vocab_size < smallest:
        raise DataError(
            f"found vocab_size={vocab_size}; expected at least {smallest} "
            "(256 bytes and the end-of-document token)"
        )
    characters = 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            characters += len(text)
            yield text

    trained = (_wordpiece if wordpiece else _byte_level)(counted(), vocab_size)
    if trained.get_vocab_size() != vocab_size:
        raise DataError(
            f"the training texts, {characters:,} characters, yield only {trained.get_vocab_size()} tokens, "
            f"fewer than vocab_size={vocab_size}; use more text or a smaller vocabulary"
        )
    trained.save(str(output), pretty=False)
    return Tokenizer(output)


def _byte_level(texts: Iterable[str], vocab_size: int) -> Any:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    return bpe


_COVERED = 0.9995
"""Share of the text's characters that are in the alphabet; the rest is unknown. SentencePiece's default."""
_LONGEST_WORD = 200
"""Characters of a word beyond which it is unknown, as in Megatron-LM."""
_WORD_BEGIN = "\u2581"


def _wordpiece(texts: Iterable[str], vocab_size: int) -> Any:
    """Merges of a BPE whose words begin with a mark; what does not begin with it continues a word (##).

    The library's own trainer of WordPiece breaks ties in the order of a hash table.
    """
    normalizer, words = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    kept = [normalizer.normalize_str(text) for text in texts]
    counts = sorted(Counter(itertools.chain(*kept)).items(), key=lambda each: (-each[1], each[0]))
    before = itertools.accumulate((count for _, count in counts), initial=0)
    limit = _COVERED * sum(count for _, count in counts)
    alphabet = [
        each for (each, _), seen in zip(counts, before, strict=False) if seen < limit and not each.isspace()
    ]
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.Metaspace(replacement=_WORD_BEGIN, prepend_scheme="always")]
    )
    initial = [_WORD_BEGIN, *alphabet]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=initial, limit_alphabet=len(initial), show_progress=False
    )
    bpe.train_from_iterator(kept, trainer=trainer)
    merged = sorted(bpe.get_vocab().items(), key=lambda each: each[1])
    pieces = dict.fromkeys([*_BERT_TOKENS, *alphabet, *("##" + each for each in alphabet)])
    pieces |= dict.fromkeys(each[1:] if each.startswith(_WORD_BEGIN) else "##" + each for each, _ in merged)
    pieces.pop("", None)
    vocabulary = {each: index for index, each in enumerate(itertools.islice(pieces, vocab_size))}
    made = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
    )
    made.normalizer, made.pre_tokenizer, made.decoder = normalizer, words, decoders.WordPiece()
    made.add_special_tokens(_BERT_TOKENS)
    return made
