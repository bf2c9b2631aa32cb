"""Which files are to be read, in which format, and how they are cut into shards of work."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mt_megatron.data.prepare.streams import zstandard_module
from mt_megatron.errors import DataError

Format = Literal["jsonl", "text", "parquet"]

_COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
_SMALLEST, _LARGEST, _SHARDS = 512 << 10, 256 << 20, 128


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file, as it was when the work was planned."""

    path: str
    """Absolute path."""

    format: Format
    """How its documents are found."""

    compression: str
    """``gz``, ``zst`` or empty."""

    size: int
    """Bytes on the disk."""

    mtime_ns: int
    """Time of its last change."""

    def changed(self) -> bool:
        """Whether the file is another one by now."""
        try:
            status = os.stat(self.path)
        except OSError:
            return True
        return (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What a shard, or a row of shards, is made from. All in plain types: workers get it as JSON."""

    kind: Literal["lines", "files", "rows"]
    """Lines of one file; whole files, a document each; row groups of one Parquet file."""

    files: tuple[InputFile, ...]
    """The files; one except for ``files``."""

    shards: int | None
    """How many shards it makes. None: known when the end of the compressed file is met."""


def file_format(name: str) -> tuple[Format, str]:
    """How the documents of a file of that name are found, and its compression: ``gz``, ``zst`` or empty."""
    stem, suffix = os.path.splitext(name.lower())
    compression = _COMPRESSIONS.get(suffix, "")
    if compression:
        suffix = os.path.splitext(stem)[1]
    return _SUFFIXES.get(suffix, "text"), compression


def folder_files(root: Path, *, suffix: str, follow_links: bool = True) -> list[Path]:
    """Every file below ``root`` whose name ends with ``suffix``; hidden ones and folders of installed
    packages are left out. Symbolic links are followed, each file and folder once: under its own name where
    that lies below ``root``.

    Raises ``DataError`` for a link that leads nowhere.
    """
    files: dict[str, Path] = {}
    links: list[Path] = []
    tops, seen = [str(root)], set[str]()
    for top in tops:
        for folder, names, entries in os.walk(top, onerror=_cannot_be_read):
            # In place: it tells the walk which folders to enter.
            names[:] = sorted(n for n in names if n not in _LEFT_OUT_FOLDERS and not n.startswith("."))
            if os.path.realpath(folder) in seen:
                names.clear()
                continue
            seen.add(os.path.realpath(folder))
            below = [os.path.join(folder, name) for name in names]
            tops += [each for each in below if follow_links and os.path.islink(each)]
            for entry in sorted(entries):
                file = Path(folder) / entry
                if not entry.endswith(suffix) or entry.startswith("."):
                    continue
                if file.is_symlink():
                    links.append(file)
                elif file.is_file():
                    files.setdefault(os.path.realpath(file), file)
    for link in links if follow_links else []:
        if _leads_somewhere(link).is_file():
            files.setdefault(os.path.realpath(link), link)
    return list(files.values())


def _cannot_be_read(error: OSError) -> None:
    raise DataError(
        f"cannot read the folder {error.filename}: {error.strerror}. Allow it, or name other input"
    )


def _leads_somewhere(path: Path) -> Path:
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"{path} is a symbolic link to {os.readlink(path)}, which does not exist; expected a file. "
            "Restore it, or remove the link"
        )
    return path


def find_inputs(
    inputs: Sequence[str], forced: Format | None, is_output: Callable[[str], bool] = lambda path: False
) -> list[InputFile]:
    """The files that ``inputs`` (files, folders, globs) name, in their order; each once.

    A folder gives every file below it by name (``folder_files``); a glob its
    matches by name; of both, absolute paths for which ``is_output`` is true are left out. The format
    follows from the name (``.jsonl``, ``.json``, ``.ndjson``, ``.parquet``, anything else is text; then
    ``.gz`` or ``.zst``) unless ``forced``.

    Raises ``DataError`` for an input that names nothing and for a file that is named twice, also by a link.
    """
    found: dict[str, InputFile] = {}
    for given in inputs:
        paths = _paths(given, is_output)
        if not paths:
            raise DataError(
                f"the input {given} names no file to read; expected a file, a folder with files or a glob "
                "that matches some"
            )
        for path in paths:
            name, place = os.path.abspath(path), os.path.realpath(path)
            if place in found:
                raise DataError(f"the input {name} is named twice; its documents would be in the data twice")
            found[place] = input_file(name, forced)
    return list(found.values())


def shard_bytes(files: Sequence[InputFile]) -> int:
    """How much text a shard has: 128 shards of everything, between 512 KiB and 256 MiB."""
    return min(_LARGEST, max(_SMALLEST, sum(file.size for file in files) // _SHARDS))


def units(
    files: Sequence[InputFile], size: int, *, text_documents: Literal["file", "line"]
) -> Iterator[Unit]:
    """Cut ``files`` into units whose shards have about ``size`` bytes of text each, in order."""
    group: list[InputFile] = []
    weight = 0
    for file in files:
        whole = file.format == "text" and text_documents == "file"
        # Text packs to about a fourth.
        grown = file.size * (4 if file.compression else 1)
        if group and (not whole or weight + grown > size):
            yield Unit(kind="files", files=tuple(group), shards=1)
            group, weight = [], 0
        if whole:
            group.append(file)
            weight += grown
        elif file.format == "parquet":
            yield Unit(kind="rows", files=(file,), shards=_row_groups(file))
        else:
            known = None if file.compression else max(1, -(-file.size // size))
            yield Unit(kind="lines", files=(file,), shards=known)
    if group:
        yield Unit(kind="files", files=tuple(group), shards=1)


def parquet_module() -> Any:
    """``pyarrow.parquet``. Raises ``DataError`` when it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "reading Parquet files needs the package pyarrow, which is not installed; install it with: "
            'pip install "mt_megatron[data]"'
        ) from error
    return pyarrow.parquet


def _paths(given: str, is_output: Callable[[str], bool]) -> list[str]:
    path = Path(given)
    if path.is_dir():
        found = [str(each) for each in sorted(folder_files(path, suffix=""))]
    elif path.is_file():
        return [given]
    elif glob.has_magic(given):
        found = [
            each
            for each in sorted(glob.glob(given, recursive=True))
            if _leads_somewhere(Path(each)).is_file()
        ]
    else:
        return []
    return [each for each in found if not is_output(os.path.abspath(each))]


def input_file(path: str, forced: Format | None) -> InputFile:
    """The file at ``path``, in the format ``forced`` or that of its name. Raises ``DataError`` where that
    cannot be read."""
    named, compression = file_format(path)
    kind = forced or named
    if compression == "zst":
        zstandard_module()  # Said now, and not by a worker later.
    if kind == "parquet" and compression:
        raise DataError(f"{path} is a compressed Parquet file; expected Parquet, which compresses by itself")
    status = os.stat(path)
    return InputFile(
        path=path, format=kind, compression=compression, size=status.st_size, mtime_ns=status.st_mtime_ns
    )


def _row_groups(file: InputFile) -> int:
    parquet = parquet_module()
    try:
        with parquet.ParquetFile(file.path) as opened:
            return max(1, int(opened.num_row_groups))
    except (OSError, ValueError):
        # Whoever reads the one shard meets the same and counts it.
        return 1
