"""Finished shards become one pair of indexed files and one report, in the order of the documents."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mt_megatron.data.prepare.findings import Finding
from mt_megatron.data.prepare.indexed_files import token_dtype, write_index
from mt_megatron.errors import DataError

_BLOCK = 1 << 20


class Merged(NamedTuple):
    """A pair of files that is complete and not yet under its name."""

    bin: Path
    idx: Path
    tokens: int
    dtype: str
    crc32: int


def output_prefix(prefix: str, key: str, sentences: bool = False) -> str:
    """``PREFIX_KEY_document``, as Megatron-LM names it; ``PREFIX_KEY_sentence`` of split documents."""
    return f"{prefix}_{key}_{'sentence' if sentences else 'document'}"


def finished_shards(folder: Path) -> list[str]:
    """The names of all shards in ``folder`` that are whole, in order."""
    return sorted(entry.name[: -len(".json")] for entry in folder.glob("*-*.json"))


def merge_key(folder: Path, key: int, vocab_size: int, *, sentences: bool = False) -> Merged:
    """Join the shards of key number ``key``, whose documents are split into ``sentences`` or not. Memory is
    that of one shard's lengths.

    Raises ``DataError`` when a shard is not what its worker wrote (a disk that lost power, a file that is
    missing), having removed it, so that it is made again; ``OSError`` when the disk is full.
    """
    names, dtype = finished_shards(folder), token_dtype(vocab_size)
    target, crc, size = folder / f"merged.{key}.bin", 0, 0
    with target.open("wb") as output:
        for name in names:
            summary = json.loads((folder / f"{name}.json").read_text())
            own, tokens = 0, -1
            # A file that is missing is damage as well; the comparison finds it.
            with (
                suppress(FileNotFoundError),
                (folder / f"{name}.{key}.bin").open("rb") as shard,
            ):
                while block := shard.read(_BLOCK):
                    own, crc = zlib.crc32(block, own), zlib.crc32(block, crc)
                    size += output.write(block)
                tokens = int(_lengths(folder, name, key).sum(dtype=np.int64))
                if sentences and _lengths(folder, name, key, "documents").size != summary["documents"]:
                    tokens = -1
            if own != summary["crc32"][key] or tokens != summary["tokens"][key]:
                raise _damaged(folder, name)
        output.flush()
        os.fsync(output.fileno())

    def pieces(kind: str) -> Iterator[npt.NDArray[np.int32]]:
        for name in names:
            yield _lengths(folder, name, key, kind)

    index = folder / f"merged.{key}.idx"
    documents = partial(pieces, "documents") if sentences else None
    write_index(index, dtype, partial(pieces, "lengths"), documents)
    return Merged(bin=target, idx=index, tokens=size // dtype.itemsize, dtype=dtype.name, crc32=crc)


def _damaged(folder: Path, name: str) -> DataError:
    (folder / f"{name}.json").unlink()
    return DataError(
        f"shard {name} in {folder} is damaged and was removed; run the same command again to make it anew"
    )


def _lengths(folder: Path, name: str, key: int, kind: str = "lengths") -> npt.NDArray[np.int32]:
    return np.fromfile(folder / f"{name}.{key}.{kind}", dtype="<i4")


def findings_of(folder: Path, report: Path, shown: list[str], *, limit: int) -> int:
    """Write the findings of all finished shards to ``report``, lines numbered from each file's
    beginning; returns how many. The first ``limit`` of each kind are added to ``shown``. Raises
    ``DataError`` as ``merge_key`` does, for a shard whose findings are missing."""
    total, counts = 0, dict[str, int]()
    lines_before, unit, crlf_in = 0, "", ""
    with report.open("w", encoding="utf-8") as output:
        for name in finished_shards(folder):
            summary: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
            if name.split("-")[0] != unit:
                unit, lines_before = name.split("-")[0], 0
            if not (folder / f"{name}.findings").exists():
                raise _damaged(folder, name)
            with (folder / f"{name}.findings").open(encoding="utf-8") as entries:
                for entry in entries:
                    found = json.loads(entry)
                    if found["kind"] == "crlf" and found["file"] == crlf_in:
                        continue  # Every shard of a file notices it.
                    crlf_in = found["file"] if found["kind"] == "crlf" else crlf_in
                    if found["at"] is not None and summary["lines"]:
                        found["at"] += lines_before
                    output.write(json.dumps(found) + "\n")
                    total += 1
                    counts[found["kind"]] = counts.get(found["kind"], 0) + 1
                    if counts[found["kind"]] <= limit:
                        shown.append(Finding(**found).line())
            lines_before += summary["lines"]
    shown += [f"... {count - limit:,} more of kind {kind}" for kind, count in counts.items() if count > limit]
    return total
