"""A corpus becomes a tokenizer, Megatron's indexed files and a manifest: once, and whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.checkpoint.files import owner_name
from mt_megatron.data.loader.tokenizer import TOKENIZER_FILES, Tokenizer, train_tokenizer
from mt_megatron.data.prepare.corpus import (
    DEFAULT_MAX_TRAIN_TOKENS,
    DEFAULT_VALIDATION_FRACTION,
    DEFAULT_VOCAB_SIZE,
    Document,
    Skipped,
    Source,
    Split,
    open_source,
    read_documents,
    split_of,
)
from mt_megatron.data.prepare.indexed_files import IndexedWriter, last_token
from mt_megatron.data.prepare.ngram import Baselines, NgramModel, read_tokens
from mt_megatron.data.prepare.sentences import split_sentences as sentences_of
from mt_megatron.errors import DataError

_MANIFEST = "corpus.json"
_FORMAT = 1
_BUILDING = ".building"
_FILES = ("tokenizer.json", "train.bin", "train.idx", "valid.bin", "valid.idx")
_TOKENIZER_CHARACTERS = 200_000_000
_BATCH = 64
_POLL_SECONDS = 0.2
_TELL_SECONDS = 60.0

Log = Callable[[str], None]
Advance = Callable[[int, int, int, int], None]
"""Told how far a pass over the corpus is: bytes done and in all, documents, training tokens."""


def _nobody(done: int, total: int, documents: int, tokens: int) -> None:
    """Where nobody watches."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A prepared folder: what its ``corpus.json`` says."""

    directory: Path
    source: str
    vocab_size: int
    train_documents: int
    valid_documents: int
    train_tokens: int
    valid_tokens: int
    skipped: tuple[Skipped, ...]
    unigram_nats: float
    """Cross-entropy per validation token of the training unigrams (see ``ngram``)."""
    bigram_nats: float
    """Cross-entropy per validation token of the interpolated training bigrams."""
    bigram_weight: float

    @property
    def tokenizer_path(self) -> Path:
        """For ``--tokenizer-model``: the folder where ``tokenizer_config.json`` was copied, which may name
        the end of documents and is read in a folder alone."""
        # The output may hold such a file of another tokenizer.
        has_config = "tokenizer_config.json" in _beside_of(self.directory / _MANIFEST)
        return self.directory if has_config else self.directory / "tokenizer.json"

    @property
    def train_prefix(self) -> str:
        """For ``--train-data-path``."""
        return str(self.directory / "train")

    @property
    def valid_prefix(self) -> str:
        """For ``--valid-data-path``."""
        return str(self.directory / "valid")


@dataclass(frozen=True, kw_only=True)
class _Options:
    vocab_size: int
    max_train_tokens: int | None
    validation_fraction: float
    tokenizer: str | None
    """Identity of a tokenizer that was given; None when one is trained."""
    eod: int | None
    """The id with which that tokenizer ends documents: not part of its identity."""
    truncation_and_padding: str | None
    """That of the tokenizer (``Tokenizer.truncation_and_padding``)."""
    split_sentences: bool | None = None
    """True or None, which manifests of earlier versions say as well."""


def prepare_corpus(
    output_dir: Path,
    *,
    corpus: Path | None = None,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    max_train_tokens: int | None = DEFAULT_MAX_TRAIN_TOKENS,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    tokenizer: Path | None = None,
    split_sentences: bool = False,
    force: bool = False,
    log: Log = print,
    advance: Advance = _nobody,
) -> Corpus:
    """Write ``tokenizer.json``, ``train.bin/.idx``, ``valid.bin/.idx`` and ``corpus.json`` to ``output_dir``.

    ``corpus``: a folder or a file of text, JSON lines or Parquet; None is the running Python's standard
    library. Documents are held out by the hash of their name. The tokenizer is trained on the
    training documents only, or taken from ``tokenizer`` (then ``vocab_size`` is not used); of a
    folder, its further files (``TOKENIZER_FILES``) are copied as well. Reading stops after the
    document that reaches ``max_train_tokens``; None reads everything.

    With ``split_sentences`` the data are for BERT: each sentence is a sequence of its own, documents have no
    end token, and the tokenizer that is trained is a lower-case WordPiece.

    A folder that already holds this very corpus is left as it is. Processes that start together
    wait for one another, or, on storage without file locks, make the same files each for itself;
    a folder whose preparation was interrupted is prepared anew, since
    ``corpus.json`` is written last. A folder prepared from other inputs or options is never
    overwritten unless ``force`` is set. ``log`` gets one line per step, ``advance`` how far it is.

    Raises ``DataError`` when there is nothing to read, too little of it, or the folder holds
    something else.
    """
    source = open_source(corpus)
    given = Tokenizer(tokenizer) if tokenizer is not None else None
    if not 0.0 < validation_fraction < 1.0:
        raise DataError(f"found validation_fraction={validation_fraction}; expected a number between 0 and 1")
    if max_train_tokens is not None and max_train_tokens < 1:
        raise DataError(f"found max_train_tokens={max_train_tokens}; expected a positive number or None")
    options = _Options(
        vocab_size=given.vocab_size if given is not None else vocab_size,
        max_train_tokens=max_train_tokens,
        validation_fraction=validation_fraction,
        tokenizer=given.identity if given is not None else None,
        eod=given.eod if given is not None else None,
        truncation_and_padding=given.truncation_and_padding if given is not None else None,
        split_sentences=split_sentences or None,
    )
    output_dir = output_dir.absolute()
    # A folder of texts may hold the output, which is none of them; symbolic links may lead to either.
    beside = (*_beside_of(output_dir / _MANIFEST), *_names_beside(given))
    made, place = {*_FILES, *beside, _MANIFEST}, output_dir.resolve()
    if not source.named_file:
        texts = [each for each in source.files if each.name not in made or each.parent.resolve() != place]
        source = replace(source, files=tuple(texts))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the folder {output_dir}: {error.strerror}; choose another --output"
        ) from error
    with _locked(output_dir, log) as has_lock:
        if not force:
            existing = _reusable(output_dir, source, options, _names_beside(given), log)
            if existing is not None:
                log(f"data: {output_dir} is already prepared ({existing.train_tokens:,} training tokens)")
                return existing
        building = output_dir / _BUILDING
        if not has_lock:
            # Processes that start together build at the same time.
            building = output_dir / f"{_BUILDING}.{owner_name()}"
            others = sorted(each.name for each in output_dir.glob(f"{_BUILDING}*"))
            if others:
                log(
                    f"data: {', '.join(others)} in {output_dir} stays: another process may work there. "
                    "Remove it when none does"
                )
        return _build(output_dir, building, source, options, given, log, advance)


def load_corpus(directory: Path) -> Corpus:
    """Read the manifest of a prepared folder. Raises ``DataError`` when it is missing or incomplete."""
    manifest = _read_manifest(directory)
    if manifest is None:
        raise DataError(
            f"{directory} holds no complete corpus ({_MANIFEST} is missing or does not match the files); "
            f"make one with: mt-megatron prepare --output {directory}"
        )
    return _corpus(directory, manifest)


@contextmanager
def _locked(directory: Path, log: Log) -> Iterator[bool]:
    """Keep other processes from preparing in ``directory`` meanwhile; one that does so is waited for. False
    where its storage has no file locks."""
    lock = FileLock(directory / ".lock", create=True)
    told = -math.inf
    while lock.state == "busy":
        if time.monotonic() - told > _TELL_SECONDS:
            # Storage that denies every lock says the same.
            log(
                f"data: waiting for another process that prepares {directory} ({lock.reason}); if there is "
                "none, choose another folder"
            )
            told = time.monotonic()
        lock.close()
        time.sleep(_POLL_SECONDS)
        lock = FileLock(directory / ".lock", create=True)
    with lock:
        if lock.state == "unsupported":
            log(
                f"data: the storage of {directory} has no file locks ({lock.reason}): processes that start "
                "together do not wait for one another, and each of them makes the whole corpus"
            )
        yield lock.state == "held"


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["files"]
        complete = manifest["format"] == _FORMAT and all(
            (directory / name).stat().st_size == sizes[name] for name in {*_FILES, *sizes}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if complete else None


def _names_beside(given: Tokenizer | None) -> tuple[str, ...]:
    """Names of the files that are copied besides ``tokenizer.json``."""
    return () if given is None else tuple(path.name for path in given.beside)


def _beside_of(manifest: Path) -> list[str]:
    """Names of the tokenizer's files besides ``tokenizer.json`` that a manifest records; none of a manifest
    that cannot be read."""
    try:
        recorded = set(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in TOKENIZER_FILES if name in recorded and name not in _FILES]


def _corpus(directory: Path, manifest: dict[str, Any]) -> Corpus:
    fields = {name: manifest[name] for name in _MANIFEST_FIELDS}
    skipped = tuple(Skipped(**entry) for entry in manifest["skipped"])
    return Corpus(directory=directory, skipped=skipped, **fields)


_MANIFEST_FIELDS = (
    "source",
    "vocab_size",
    "train_documents",
    "valid_documents",
    "train_tokens",
    "valid_tokens",
    "unigram_nats",
    "bigram_nats",
    "bigram_weight",
)


def _reusable(
    directory: Path, source: Source, options: _Options, beside: Sequence[str], log: Log
) -> Corpus | None:
    """The corpus in ``directory`` when it is this one; None when there is none or half of one."""
    manifest = _read_manifest(directory)
    if manifest is None:
        present = [name for name in (*_FILES, *beside, _MANIFEST) if (directory / name).exists()]
        ours = any(directory.glob(f"{_BUILDING}*")) or (directory / _MANIFEST).exists()
        if present and not ours:
            raise DataError(
                f"{directory} holds {', '.join(present)}, not made by this command; they would be "
                "overwritten. Choose another --output, or use --force"
            )
        if present:
            log(f"data: {directory} is incomplete and is prepared anew")
        return None
    before = manifest["options"]
    if options.eod is not None and "eod" not in before:
        # Manifests of earlier versions do not name the token, with which every document ends.
        before = {**before, "eod": last_token(str(directory / "train"))}
    differences = [
        f"{name} {before.get(name)} -> {value}"
        for name, value in asdict(options).items()
        if before.get(name) != value
    ]
    if manifest["source"] != source.label:
        differences.append(f"corpus {manifest['source']} -> {source.label}")
    elif (
        manifest["quick_fingerprint"] != source.quick_fingerprint()
        and manifest["content_fingerprint"] != source.content_fingerprint()
    ):
        differences.append("the corpus's files have changed")
    if differences:
        raise DataError(
            f"{directory} holds a corpus made otherwise ({'; '.join(differences)}). Runs may depend on it: "
            "choose another --output, or use --force to replace it"
        )
    return _corpus(directory, manifest)


def _build(
    directory: Path,
    building: Path,
    source: Source,
    options: _Options,
    given: Tokenizer | None,
    log: Log,
    advance: Advance,
) -> Corpus:
    # The output may be the folder of the given tokenizer.
    copies = {} if given is None else {path.name: path.read_bytes() for path in (given.path, *given.beside)}
    # A tokenizer's file of an earlier preparation would be read beside the new tokenizer.json.
    for manifest_path in (building / _MANIFEST, directory / _MANIFEST):
        for name in _beside_of(manifest_path):
            # Files of the given tokenizer are replaced at the end: a build that fails takes none away.
            if name not in copies:
                (directory / name).unlink(missing_ok=True)
    if building.exists():
        shutil.rmtree(building)
    building.mkdir()
    # From here on the folder is incomplete: the manifest goes first and comes back last.
    (directory / _MANIFEST).unlink(missing_ok=True)

    log(f"data: reading {len(source.files):,} files of {source.label}")
    fraction = _fraction_held_out(source, options.validation_fraction)
    if fraction != options.validation_fraction:
        log(
            f"data: a fraction of {options.validation_fraction} holds no document out: {fraction:.2f} is used"
        )
    if given is not None:
        for name, content in copies.items():
            (building / name).write_bytes(content)
        # A tokenizer.json that is opened alone does not read tokenizer_config.json beside it.
        tokenizer = Tokenizer(building / "tokenizer.json", eod_token=given.eod_token)
    else:
        wordpiece = bool(options.split_sentences)
        kind = "WordPiece" if wordpiece else "byte-level BPE"
        log(f"data: training a {kind} of {options.vocab_size:,} tokens")
        texts, output = _training_texts(source, fraction, advance), building / "tokenizer.json"
        tokenizer = train_tokenizer(texts, vocab_size=options.vocab_size, output=output, wordpiece=wordpiece)
    log("data: encoding")
    skipped: list[Skipped] = []
    documents, tokens, special = _encode(source, options, fraction, tokenizer, building, skipped, advance)
    if not all(documents.values()):
        raise DataError(
            f"of the documents in {source.label} {documents['train']} fell to 'train' and "
            f"{documents['valid']} to 'valid' (validation fraction {fraction:.2f}); expected some of both: "
            "use more documents or lines, another --validation-fraction, or a higher --max-tokens"
        )
    log("data: counting unigrams and bigrams")
    model, baselines = _baselines(building, tokenizer.vocab_size)
    manifest = {
        "format": _FORMAT,
        "source": source.label,
        "options": asdict(options),
        "quick_fingerprint": source.quick_fingerprint(),
        "content_fingerprint": source.content_fingerprint(),
        "tokenizer_sha256": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "special_tokens_in_text": special,
        "train_documents": documents["train"],
        "valid_documents": documents["valid"],
        "train_tokens": tokens["train"],
        "valid_tokens": tokens["valid"],
        "unigram_nats": baselines.unigram,
        "bigram_nats": baselines.bigram,
        "bigram_weight": model.weight,
        "skipped": [asdict(entry) for entry in skipped],
        "files": {name: (building / name).stat().st_size for name in (*_FILES, *_names_beside(given))},
    }
    _put_in_place(building, directory, manifest)
    made = _corpus(directory, manifest)
    log(
        f"data: {made.train_tokens:,} training tokens in {made.train_documents:,} documents, "
        f"{made.valid_tokens:,} validation tokens in {made.valid_documents:,}; {_skipped_line(made.skipped)}"
    )
    if special:
        log(f"data: the text names {special:,} special tokens of the tokenizer, which are plain text")
    log(
        f"data: validation cross-entropy in nats per token: unigram {made.unigram_nats:.4f}, "
        f"bigram {made.bigram_nats:.4f}"
    )
    if made.tokenizer_path == directory:
        log(
            f"data: train with --tokenizer-model {directory}: tokenizer_config.json is not read beside "
            f"{made.tokenizer_path / 'tokenizer.json'}"
        )
    return made


def _put_in_place(building: Path, directory: Path, manifest: dict[str, Any]) -> None:
    """Give the files of ``building`` their names in ``directory``: each of them whole, the manifest last."""
    found = _read_manifest(directory)
    # Times of files differ between the nodes' copies of the same corpus.
    aside = {"quick_fingerprint": ""}
    if found is not None and found | aside == manifest | aside:
        # Another process made the same on storage without locks, and a run may read its files already.
        shutil.rmtree(building)
        return
    (building / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for name in (*manifest["files"], _MANIFEST):
        os.replace(building / name, directory / name)
    building.rmdir()


def _skipped_line(skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return "nothing skipped"
    bad = [f"{entry.name} ({entry.reason})" for entry in skipped if entry.reason != "empty"]
    named = f": {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}" if bad else ""
    return f"skipped {len(skipped) - len(bad)} empty and {len(bad)} bad{named}"


def _training_texts(source: Source, fraction: float, advance: Advance) -> Iterator[str]:
    left = _TOKENIZER_CHARACTERS
    skipped: list[Skipped] = []
    total, done, used = _bytes(source), 0, 0
    for document in read_documents(source, skipped):
        done += len(document.text.encode())
        if split_of(document.name, fraction) == "train":
            yield document.text
            used += 1
            left -= len(document.text)
            if left <= 0:
                break
        # Compressed files hold more than their size.
        reached = max(done, int(total * (1 - left / _TOKENIZER_CHARACTERS)))
        advance(min(total, reached), total, used, 0)
    if not used:
        named = "; ".join(f"{entry.name}: {entry.reason}" for entry in skipped[:5])
        raise DataError(
            f"no document of {source.label} can be used for training "
            f"({named or 'all are held out for validation'}{'; ...' if len(skipped) > 5 else ''}); expected "
            "several documents or lines of text in UTF-8"
        )


def _fraction_held_out(source: Source, wanted: float) -> float:
    """``wanted``, or where it holds none of a few documents out, a larger fraction that does."""
    while (
        wanted < 0.9
        and len(list(islice(read_documents(source, []), 2))) == 2
        and all(split_of(each.name, wanted) == "train" for each in read_documents(source, []))
    ):
        wanted = max(DEFAULT_VALIDATION_FRACTION, 1.1 * wanted)
    return wanted


def _bytes(source: Source) -> int:
    return sum(file.stat().st_size for file in source.files)


def _encode(
    source: Source,
    options: _Options,
    fraction: float,
    tokenizer: Tokenizer,
    folder: Path,
    skipped: list[Skipped],
    advance: Advance,
) -> tuple[dict[Split, int], dict[Split, int], int]:
    """Write both splits, one document per sequence with its end, or its sentences; returns documents, tokens,
    and how many special tokens the texts name."""
    splits: tuple[Split, ...] = ("train", "valid")
    writers = {split: IndexedWriter(folder / split, tokenizer.vocab_size) for split in splits}
    documents: dict[Split, int] = dict.fromkeys(splits, 0)
    tokens: dict[Split, int] = dict.fromkeys(splits, 0)
    total, done, special = _bytes(source), 0, 0
    limit = options.max_train_tokens
    parts = sentences_of if options.split_sentences else _whole
    for document, ids in _encoded(read_documents(source, skipped), tokenizer, parts):
        split = split_of(document.name, fraction)
        if not options.split_sentences:
            ids[-1].append(tokenizer.eod)
        sequences = list(filter(None, ids))
        writers[split].add(*sequences)
        documents[split] += 1
        special += tokenizer.special_tokens_in(document.text)
        tokens[split] += sum(map(len, sequences))
        done += len(document.text.encode())
        # Whichever ends the pass first: the text, or the limit on tokens.
        share = 0.0 if limit is None else tokens["train"] / limit
        reached = min(total, max(done, int(total * min(1.0, share))))
        advance(reached, total, sum(documents.values()), tokens["train"])
        if limit is not None and tokens["train"] >= limit:
            break
    for split in splits:
        writers[split].finish()
    return documents, tokens, special


def _whole(text: str) -> list[str]:
    return [text]


def _encoded(
    documents: Iterator[Document], tokenizer: Tokenizer, parts: Callable[[str], list[str]]
) -> Iterator[tuple[Document, list[list[int]]]]:
    """Each document with the tokens of its ``parts``."""
    while batch := list(islice(documents, _BATCH)):
        texts = [parts(document.text) for document in batch]
        flat = iter(tokenizer.encode_batch([part for each in texts for part in each]))
        yield from (
            (document, list(islice(flat, len(each)))) for document, each in zip(batch, texts, strict=True)
        )


def _baselines(folder: Path, vocab_size: int) -> tuple[NgramModel, Baselines]:
    model = NgramModel.of_prefixes([str(folder / "train")], vocab_size)
    valid = read_tokens(str(folder / "valid"))
    return model, model.evaluate(valid[:-1], valid[1:])
