"""Where the numbers of a tensor lie in an archive that ``torch.save`` made, whichever version of torch did.

An archive is a zip of stored members: a pickle that describes the tensor, and its bytes. The pickle is read
with names alone; nothing in it is called.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from mt_megatron.convert.tensors.mapped_file import MappedFile

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class Located:
    """A contiguous tensor inside of an archive."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""


def locate(mapped: MappedFile, offset: int, length: int) -> Located | None:
    """The one tensor of the archive that has ``length`` bytes from ``offset``; None when it is none of a
    plain contiguous tensor, which ``torch.load`` has to look at."""
    try:
        with zipfile.ZipFile(_Region(mapped, offset, length)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            described = _Names(io.BytesIO(archive.read(members["data.pkl"]))).load()
            data = members["data/0"]
            byte_order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
    except (zipfile.BadZipFile, KeyError, pickle.UnpicklingError, ValueError, EOFError, IndexError):
        return None
    if not isinstance(described, tuple) or len(described) < 4 or byte_order != b"little":
        return None
    storage, first, shape, strides = described[:4]
    if not isinstance(storage, _Storage) or storage.key != "0" or first != 0:
        return None
    if data.compress_type != zipfile.ZIP_STORED or tuple(strides) != _contiguous(shape):
        return None
    signature, name, extra = _LOCAL_HEADER.unpack(
        mapped.bytes(offset + data.header_offset, _LOCAL_HEADER.size)
    )
    if signature != b"PK\x03\x04" or data.file_size < torch.Size(shape).numel() * storage.dtype.itemsize:
        return None
    return Located(
        dtype=storage.dtype,
        shape=tuple(shape),
        offset=offset + data.header_offset + _LOCAL_HEADER.size + name + extra,
    )


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str


class _Names(pickle.Unpickler):
    """Gives the arguments of what the pickle would call."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: arguments
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(str(kind))
        return _Storage(dtype, key)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


class _Region(io.RawIOBase):
    """A part of a mapped file as a file, of which only what is asked for is copied."""

    def __init__(self, mapped: MappedFile, offset: int, length: int) -> None:
        self._mapped = mapped
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        content = self._mapped.bytes(self._offset + self._at, count)
        self._at += count
        return content
