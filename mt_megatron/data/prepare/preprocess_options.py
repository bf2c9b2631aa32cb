"""What ``preprocess`` is told, what it tells meanwhile, and what it gives back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mt_megatron.data.prepare.inputs import Format


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """What decides about the result, apart from the files; all but ``workers``, ``strict`` and
    ``max_bad_share`` must be the same for an interrupted run to be continued."""

    inputs: tuple[str, ...]
    """Files, folders and globs."""

    output_prefix: str
    """Beginning of the names of what is written."""

    json_keys: tuple[str, ...] = ("text",)
    """Keys of JSON objects, columns of Parquet files; each makes a pair of files."""

    input_format: Format | None = None
    """None: by the files' names."""

    text_documents: Literal["file", "line"] = "file"
    """What a document of a text file is."""

    tokenizer_type: str = "HuggingFaceTokenizer"
    """One of ``tokenizer.TOKENIZER_TYPES``."""

    tokenizer_model: str | None = None
    """Its file."""

    include_special_tokens: bool = True
    """Whether HuggingFaceTokenizer adds the tokens of the file's post-processor, as Megatron-LM's does."""

    split_special_tokens: bool = False
    """Whether HuggingFaceTokenizer reads the name of a special token in a text as plain text; Megatron-LM's
    does not."""

    vocab_size: int | None = None
    """Of NullTokenizer."""

    train_bpe: int | None = None
    """Train a byte-level BPE of so many tokens on the input instead."""

    split_sentences: bool = False
    """Whether the sentences of a document are sequences of their own, by ``sentences.split_sentences``, and
    no special tokens are added: samples of masked words bring their own."""

    append_eod: bool = False
    """Whether each document ends with the tokenizer's end-of-document token."""

    max_document_bytes: int = 64 << 20
    """Longer documents are left out. Bounds the memory of a worker."""

    workers: int = 1
    """Processes that encode."""

    strict: bool = False
    """Whether anything that is left out is an error."""

    max_bad_share: float = 0.05
    """Largest share of the input that may be bad or lost (``findings.bad_share``)."""

    @property
    def special_tokens(self) -> dict[str, bool]:
        """Both choices in force: a trained tokenizer, and other types, add and match none."""
        published = self.tokenizer_type == "HuggingFaceTokenizer" and self.train_bpe is None
        return {
            "include_special_tokens": published and self.include_special_tokens and not self.split_sentences,
            "split_special_tokens": not published or self.split_special_tokens,
        }


class Progress(Protocol):
    """Who is told how far the work is."""

    def say(self, line: str) -> None:
        """One line for a person."""

    def advance(self, done_bytes: int, total_bytes: int, documents: int, tokens: int) -> None:
        """Bytes of the input on the disk, and what they made so far."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was made."""

    prefixes: tuple[str, ...]
    """One for each key; for ``--data-path``."""

    documents: int
    tokens: tuple[int, ...]
    """For each key."""
    counts: dict[str, int]
    """What was found, by kind (see ``findings``)."""
    report: str | None
    """JSONL file with every finding; None when there was none."""
    tokenizer_model: str | None
    """The tokenizer's file, also when it was trained here."""
    already: bool = False
    """Whether it had been made before."""


@dataclass
class Tally:
    """Sums over finished shards."""

    total_bytes: int
    done_bytes: int = 0
    lost_bytes: int = 0
    special_tokens: int = 0
    documents: int = 0
    tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, summary: dict[str, Any]) -> None:
        self.done_bytes += summary["disk_bytes"]
        # A shard of an unfinished run of an earlier version does not say these.
        self.lost_bytes += summary.get("lost_bytes", 0)
        self.special_tokens += summary.get("special_tokens", 0)
        self.documents += summary["documents"]
        self.tokens += sum(summary["tokens"])
        self.counts.update(summary["counts"])
