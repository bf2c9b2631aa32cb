"""Where documents come from, in an order that never changes, and which of them are held out."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mt_megatron.errors import DataError

DEFAULT_VOCAB_SIZE = 4096
DEFAULT_MAX_TRAIN_TOKENS = 10_000_000
DEFAULT_VALIDATION_FRACTION = 0.05

Split = Literal["train", "valid"]

_PIECE = 64 * 1024
_LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})


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
    source = _folder(root, label="python-standard-library", suffix=".py")
    if not source.files:
        raise DataError(
            f"found no .py files in {root}; this Python comes without library source: give --corpus PATH"
        )
    return source


def open_source(path: Path | None) -> Source:
    """The corpus at ``path``: a folder (every file below it, hidden ones and symbolic links left
    out), one ``.jsonl`` file, or one text file. None: the standard library.

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
    raise DataError(f"found nothing at {path}; expected a folder, a .jsonl file or a text file")


def read_documents(source: Source, skipped: list[Skipped]) -> Iterator[Document]:
    """Every document of ``source`` in order; what cannot be used is appended to ``skipped``.

    A file is a document. A ``.jsonl`` file holds one document a line, under the key ``text``. A
    text file that was named is cut at line ends into documents of about 64 KiB, so that
    there is something to hold out. Files that are not UTF-8 and empty documents are skipped.

    Raises ``DataError`` for a line of a ``.jsonl`` file that is not such an object, and for one file that
    was named and cannot be used.
    """
    for file in source.files:
        name = source.relative(file)
        if file.suffix == ".jsonl":
            yield from _json_lines(file, name, skipped)
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
            yield Document(name=name, text=text)


def split_of(name: str, validation_fraction: float) -> Split:
    """Which split the document ``name`` belongs to: by the hash of its name, so that it never
    changes sides when documents are added or removed."""
    digest = hashlib.sha256(b"split\0" + name.encode(errors="surrogateescape")).digest()
    bucket = int.from_bytes(digest[:8], "big")
    return "valid" if bucket < validation_fraction * 2.0**64 else "train"


def folder_files(root: Path, *, suffix: str) -> list[Path]:
    """Every file below ``root`` whose name ends with ``suffix``, in no order; hidden ones, symbolic
    links and folders of installed packages are left out."""
    files = []
    for folder, names, entries in os.walk(root):
        # In place: it tells the walk which folders to enter.
        names[:] = [n for n in names if n not in _LEFT_OUT_FOLDERS and not n.startswith(".")]
        for entry in entries:
            file = Path(folder) / entry
            wanted = entry.endswith(suffix) and not entry.startswith(".")
            if wanted and file.is_file() and not file.is_symlink():
                files.append(file)
    return files


def _folder(root: Path, *, label: str, suffix: str) -> Source:
    files = folder_files(root, suffix=suffix)
    files.sort(key=lambda file: _order(file.relative_to(root).as_posix()))
    return Source(label=label, root=root, files=tuple(files))


def _order(name: str) -> tuple[bytes, str]:
    # Another salt than split_of's: with the same one the held-out documents would all come first.
    return hashlib.sha256(b"order\0" + name.encode(errors="surrogateescape")).digest(), name


def _json_lines(file: Path, name: str, skipped: list[Skipped]) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{file}, line {number}: not JSON ({error}); expected an object a line"
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise DataError(
                    f"{file}, line {number}: expected an object with a string under the key 'text'; "
                    "for another key: mt-megatron preprocess --json-keys KEY"
                )
            if _lone_surrogate(record["text"]):
                skipped.append(
                    Skipped(name=f"{name}:{number}", reason="not UTF-8 (half of a surrogate pair)")
                )
            elif record["text"].strip():
                yield Document(name=f"{name}:{number}", text=record["text"])
            else:
                skipped.append(Skipped(name=f"{name}:{number}", reason="empty"))


def _lone_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


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
