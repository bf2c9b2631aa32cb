"""Megatron's ``.bin``/``.idx`` pair: writing an index without holding it, and checking a pair's sizes.

The layout is that of ``megatron.core.datasets.indexed_dataset``: tokens one after another in
``.bin``; in ``.idx`` a magic, version 1, the dtype's code, the numbers of sequences and of document
borders, then int32 lengths, int64 byte offsets and int64 borders. Nothing here imports torch.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_LARGEST_UINT16_VOCABULARY = 65500
Lengths = Callable[[], Iterable[npt.NDArray[np.int32]]]
"""Gives the lengths of all sequences in pieces, or of all documents; called more than once."""


class IndexHeader(NamedTuple):
    """What an ``.idx`` file says about itself."""

    dtype: np.dtype[Any]
    """Of the tokens."""

    sequences: int
    """Number of sequences."""

    documents: int
    """Number of documents."""

    tokens: int
    """Number of tokens that ``.bin`` must hold."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron stores ids of such a vocabulary in: uint16, or int32 when they do not fit."""
    return np.dtype(np.uint16 if vocab_size < _LARGEST_UINT16_VOCABULARY else np.int32)


def write_index(path: Path, dtype: np.dtype[Any], lengths: Lengths, documents: Lengths | None = None) -> None:
    """Write the index of sequences of these ``lengths`` to ``path``. ``documents`` gives the number of
    sequences of each document; None: one.

    The bytes are those of Megatron-Core's own ``IndexedDatasetBuilder.finalize``; memory is that of
    one piece of ``lengths``. The file is on the disk when this returns.
    """
    code = next(code for code, kind in _CODES.items() if np.dtype(kind) == dtype)
    count = sum(len(piece) for piece in lengths())
    held = documents or (lambda: (np.ones_like(piece) for piece in lengths()))
    borders = 1 + sum(len(piece) for piece in held())
    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, count, borders))
        for piece in lengths():
            file.write(piece.astype("<i4").tobytes())
        offset = 0
        for piece in lengths():
            ends = offset + np.cumsum(piece.astype(np.int64)) * dtype.itemsize
            file.write((ends - piece.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
            offset = int(ends[-1]) if len(ends) else offset
        border = 0
        file.write(struct.pack("<q", border))
        for piece in held():
            ends = border + np.cumsum(piece, dtype="<i8")
            file.write(ends.tobytes())
            border = int(ends[-1]) if len(ends) else border
        file.flush()
        os.fsync(file.fileno())


class IndexedWriter:
    """Writes documents one after another; the index needs eight bytes of memory for each."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self._prefix = str(prefix)
        self._file = Path(f"{prefix}.bin").open("wb")  # noqa: SIM115 - finish() closes it
        self._lengths, self._documents = array("i"), array("i")

    def add(self, *sequences: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append one document: its sequences."""
        for tokens in sequences:
            self._file.write(np.asarray(tokens, dtype=self.dtype).tobytes())
            self._lengths.append(len(tokens))
        self._documents.append(len(sequences))

    def finish(self) -> None:
        """Write the index; both files are on the disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths, documents = (np.array(each, dtype=np.int32) for each in (self._lengths, self._documents))
        write_index(Path(f"{self._prefix}.idx"), self.dtype, lambda: [lengths], lambda: [documents])


def read_header(path: Path) -> IndexHeader:
    """The header of the index ``path``, checked against the file's size; the arrays are not read
    except for the last length and offset.

    Raises ``ValueError``, saying what was found, when it is no index or cut off, and ``OSError``.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
        if len(start) < _HEADER.size or not start.startswith(_MAGIC):
            raise ValueError("it does not begin as a Megatron index does")
        _, version, code, sequences, borders = _HEADER.unpack(start)
        if version != 1 or code not in _CODES:
            raise ValueError(f"it has version {version} and dtype code {code}; expected version 1 and 1 to 8")
        expected = _HEADER.size + sequences * 12 + borders * 8
        # A multimodal dataset has one more byte for each sequence.
        if borders < 1 or size not in (expected, expected + sequences):
            raise ValueError(
                f"it has {size} bytes for {sequences} sequences and {borders} document borders; expected "
                f"{expected}"
            )
        dtype, tokens = np.dtype(_CODES[code]), 0
        if sequences:
            file.seek(_HEADER.size + (sequences - 1) * 4)
            (length,) = struct.unpack("<i", file.read(4))
            file.seek(_HEADER.size + sequences * 12 - 8)
            (offset,) = struct.unpack("<q", file.read(8))
            tokens = offset // dtype.itemsize + length
        file.seek(_HEADER.size + sequences * 12 + (borders - 1) * 8)
        (last,) = struct.unpack("<q", file.read(8))
        if last != sequences:
            raise ValueError(f"its documents end at sequence {last} of {sequences}")
    return IndexHeader(dtype=dtype, sequences=sequences, documents=borders - 1, tokens=tokens)


def pair_problem(prefix: str) -> str | None:
    """What is wrong with ``prefix.bin`` and ``prefix.idx``, on one line; None when they fit.

    Reads the index's header and both sizes, so it takes no time on a large file.
    """
    missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
    if missing:
        names = " and ".join(prefix + each for each in missing)
        verb = "do" if len(missing) > 1 else "does"
        return f"{names} {verb} not exist; expected a prefix without .bin and .idx"
    try:
        header = read_header(Path(prefix + ".idx"))
        found = Path(prefix + ".bin").stat().st_size
    except ValueError as error:
        return f"{prefix}.idx is not a Megatron index file or is damaged: {error}. Make the data again"
    except OSError as error:
        return f"{prefix}.idx cannot be read: {error.strerror}"
    expected = header.tokens * header.dtype.itemsize
    if found == expected:
        return None
    return (
        f"{prefix}.bin has {found} bytes; its index expects {expected} ({header.tokens} tokens): the two "
        "files do not belong together or one was cut off. Make the data again"
    )


def largest_token(prefix: str, *, count: int = 1 << 20) -> int | None:
    """The largest of the first ``count`` tokens of a pair that fits; None when there is none."""
    header = read_header(Path(prefix + ".idx"))
    head = np.fromfile(prefix + ".bin", dtype=header.dtype, count=count)
    return int(head.max()) if head.size else None


def last_token(prefix: str) -> int | None:
    """The last token of a pair; None when there is none or the pair cannot be read."""
    try:
        header = read_header(Path(prefix + ".idx"))
        start = max(0, header.tokens - 1) * header.dtype.itemsize
        found = np.fromfile(prefix + ".bin", dtype=header.dtype, count=1, offset=start)
    except (OSError, ValueError):
        return None
    return int(found[0]) if found.size else None
