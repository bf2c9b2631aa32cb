"""Where documents come from, in an order that never changes, and which of them are held out."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mt_megatron.data.prepare.findings import LEFT_OUT, Finding, bad_share, summary_of
from mt_megatron.data.prepare.inputs import file_format, folder_files, input_file, units
from mt_megatron.data.prepare.preprocess_options import PreprocessOptions
from mt_megatron.data.prepare.reading import Reading, ShardReader
from mt_megatron.errors import DataError

DEFAULT_VOCAB_SIZE = 4096
DEFAULT_MAX_TRAIN_TOKENS = 10_000_000
DEFAULT_VALIDATION_FRACTION = 0.05

Split = Literal["train", "valid"]

_PIECE = 64 * 1024
_READING = Reading(
    keys=("text",),
    max_document_bytes=PreprocessOptions.max_document_bytes,
    text_documents="file",
    shard_bytes=sys.maxsize,
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. ``name`` is stable across machines: a relative path, with ``:N`` for part N of a file."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Something that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files a corpus is made of."""

    label: str
    """What the manifest calls it."""

    root: Path
    """Folder that names are relative to."""

    files: tuple[Path, ...]
    """Absolute paths, sorted by the hash of their relative name: a limit on tokens then takes
    an even sample of the folder instead of its first letters."""

    named_file: bool = False
    """Whether it is one file that was named, instead of what a folder holds."""

    def relative(self, file: Path) -> str:
        """The name of ``file`` in the manifest."""
        return file.relative_to(self.root).as_posix()

    def quick_fingerprint(self) -> str:
        """A digest of names, sizes and times: equal means unchanged, different means look closer."""
        digest = hashlib.sha256()
        for file in self.files:
            status = file.stat()
            digest.update(f"{self.relative(file)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def content_fingerprint(self) -> str:
        """A digest of names and contents."""
        digest = hashlib.sha256()
        for file in self.files:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{self.relative(file)}\0{content}\n".encode())
        return digest.hexdigest()


def standard_library() -> Source:
    """The source of the running Python's standard library: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    source = _folder(root, label="python-standard-library", suffix=".py", follow_links=False)
    if not source.files:
        raise DataError(
            f"found no .py files in {root}; this Python comes without library source: give --corpus PATH"
        )
    return source


def open_source(path: Path | None) -> Source:
    """The corpus at ``path``: a folder (every file below it, hidden ones left out) or one file. None: the
    standard library.

    Raises ``DataError`` when there is nothing to read.
    """
    if path is None:
        return standard_library()
    path = path.absolute()
    if path.is_dir():
        source = _folder(path, label=str(path), suffix="")
        if not source.files:
            raise DataError(f"the folder {path} holds no files to read")
        return source
    if path.is_file():
        return Source(label=str(path), root=path.parent, files=(path,), named_file=True)
    raise DataError(f"found nothing at {path}; expected a folder or a file")


def read_documents(source: Source, skipped: list[Skipped]) -> Iterator[Document]:
    """Every document of ``source`` in order; what cannot be used is appended to ``skipped``.

    A file is a document. JSON lines and Parquet files (``inputs.file_format``) hold one document a line or
    row, under the key ``text``. A text file that was named is cut at line ends into documents of about
    64 KiB, so that there is something to hold out. What is bad or empty is skipped.

    Raises ``DataError`` where more of such files is bad or lost than ``preprocess`` allows, and for one file
    that was named and cannot be used.
    """
    found: list[Finding] = []
    reader, documents = ShardReader(_READING, found.append), 0
    for file in source.files:
        name, first = source.relative(file), len(found)
        kind, compression = file_format(file.name)
        if kind != "text" or compression:
            for document in _records(reader, file, name):
                documents += 1
                whole = source.named_file and kind == "text"
                yield from _pieces(name, document.text) if whole else [document]
            skipped += [_skipped(each, name) for each in found[first:] if each.kind in LEFT_OUT]
            continue
        try:
            # Not read_text: it would turn every CRLF into LF, and the text is to be taken as it is.
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            if source.named_file:
                raise DataError(
                    f"{file}: not UTF-8 (byte {error.start}); expected text in UTF-8. Convert it (iconv -f "
                    "ENCODING -t UTF-8), or give another --corpus"
                ) from error
            skipped.append(Skipped(name=name, reason=f"not UTF-8 (byte {error.start})"))
            continue
        if source.named_file and not text.strip():
            raise DataError(f"{file}: empty; expected text in UTF-8. Give another --corpus")
        if not text.strip():
            skipped.append(Skipped(name=name, reason="empty"))
        elif source.named_file:
            yield from _pieces(name, text)
        else:
            documents += 1
            yield Document(name=name, text=text)
    reader.close()
    _judge(source, [each for each in found if each.kind in LEFT_OUT], documents)


def _skipped(finding: Finding, name: str) -> Skipped:
    reason = finding.kind if finding.kind == "empty" else LEFT_OUT[finding.kind]
    return Skipped(name=name if finding.at is None else f"{name}:{finding.at}", reason=reason)


def split_of(name: str, validation_fraction: float) -> Split:
    """Which split the document ``name`` belongs to: by the hash of its name, so that it never
    changes sides when documents are added or removed."""
    digest = hashlib.sha256(b"split\0" + name.encode(errors="surrogateescape")).digest()
    bucket = int.from_bytes(digest[:8], "big")
    return "valid" if bucket < validation_fraction * 2.0**64 else "train"


def _folder(root: Path, *, label: str, suffix: str, follow_links: bool = True) -> Source:
    files = folder_files(root, suffix=suffix, follow_links=follow_links)
    files.sort(key=lambda file: _order(file.relative_to(root).as_posix()))
    return Source(label=label, root=root, files=tuple(files))


def _order(name: str) -> tuple[bytes, str]:
    # Another salt than split_of's: with the same one the held-out documents would all come first.
    return hashlib.sha256(b"order\0" + name.encode(errors="surrogateescape")).digest(), name


def _records(reader: ShardReader, file: Path, name: str) -> Iterator[Document]:
    """The documents of a file that is not plain text, as ``preprocess`` reads it."""
    (unit,) = units([input_file(str(file), None)], sys.maxsize, text_documents="file")
    number = 0
    for shard in range(unit.shards or 1):
        for (text,) in reader.read(unit, shard):
            number += 1
            yield Document(name=f"{name}:{reader.lines or number}", text=text)


def _judge(source: Source, found: list[Finding], documents: int) -> None:
    counts = Counter(each.kind for each in found)
    lost, total = sum(each.lost_bytes for each in found), sum(file.stat().st_size for file in source.files)
    if bad_share(counts, documents, lost_bytes=lost, total_bytes=total) > PreprocessOptions.max_bad_share:
        said = "".join(f"\n- {each.line()}" for each in found[:5])
        raise DataError(
            f"{source.label}: too much of it is bad or lost ({summary_of(counts)}); expected documents under "
            f"the key 'text', an object a line in JSON lines, a row in Parquet.{said}\nMend the files; for "
            "another key or limit: mt-megatron preprocess --json-keys KEY --max-bad-share X"
        )


def _pieces(name: str, text: str) -> Iterator[Document]:
    piece: list[str] = []
    size = number = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= _PIECE:
            number += 1
            yield Document(name=f"{name}:{number}", text="".join(piece))
            piece, size = [], 0
    if piece:
        yield Document(name=f"{name}:{number + 1}", text="".join(piece))
