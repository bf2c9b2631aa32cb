"""A distributed checkpoint (``torch_dist``) read tensor by tensor, without process groups and at any layout.

Tensors are named as in an unsharded model of local layers, those of an optimizer after them.
"""

from __future__ import annotations

import io
import itertools
import pickle
import struct
import threading
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_megatron.convert.tensors.mapped_file import MappedFile
from mt_megatron.convert.tensors.megatron_names import names_of, split_state_key
from mt_megatron.convert.tensors.sources import TensorInfo
from mt_megatron.convert.tensors.state_names import kind_of, state_name
from mt_megatron.convert.tensors.table import listed
from mt_megatron.convert.torch_dist.flattened import Flattened
from mt_megatron.convert.torch_dist.metadata import Chunk, StoredTensor, read_metadata
from mt_megatron.errors import CheckpointError

_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "opt_param_scheduler", "fp8.")


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """A tensor of the whole model: a part of a stored one."""

    stored: StoredTensor
    index: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """Those that hold some of it."""

    flattened: Flattened | None = None
    """How it was cut by a distributed optimizer, if it was."""

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.stored.shape if self.flattened is None else self.flattened.shape
        return whole[len(self.index) :]


class DistFolder:
    """The tensors of a distributed checkpoint by name. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Reads the metadata only. Raises ``CheckpointError``."""
        self.folder = folder
        self.contents = read_metadata(folder)
        self.keys = {key for key in self.contents.tensors if not key.startswith(_NOT_WEIGHTS)}
        self._maps: dict[str, MappedFile] = {}
        self._lock = threading.Lock()
        self._wholes: dict[str, _Whole] = {}
        for key in sorted(self.keys):
            self._add(key, self.contents.tensors[key])
        states = {key: split_state_key(key) for key in sorted(self.contents.tensors)}
        for key, state in states.items():
            if state is not None:
                self._add(key, self.contents.tensors[key], *state)
        kept = {
            name: TensorInfo(dtype=each.stored.dtype, shape=each.shape) for name, each in self._wholes.items()
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: each for name, each in kept.items() if kind_of(name) is None
        }
        self.state: Mapping[str, TensorInfo] = {
            name: each for name, each in kept.items() if kind_of(name) is not None
        }
        files = {chunk.file for each in self._wholes.values() for chunk in each.chunks}
        absent = sorted(file for file in files if not (folder / file).is_file())
        if absent:
            raise CheckpointError(f"{folder} lacks {len(absent)} of its files: {listed(absent)}")

    @property
    def has_optimizer(self) -> bool:
        """Whether there is state of an optimizer as well."""
        keys = (*self.contents.tensors, *self.contents.objects)
        return any(key.startswith(_NOT_WEIGHTS[:2]) for key in keys)

    @property
    def flat_optimizer(self) -> str | None:
        """Why an optimizer's state has no tensors by parameter; None when it has."""
        if self.state or not self.has_optimizer:
            return None
        return (
            "its distributed optimizer's state lies in flat buffers without the parameters' places in them "
            "(fully_sharded_bucket_space or dp_zero_gather_scatter); Megatron-LM saves it by parameter with "
            "--ckpt-fully-parallel-save"
        )

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor ``name``, or its ``rows`` (first, behind the last) alone: a view of its file where one
        chunk holds all of it, else put together. Raises ``CheckpointError`` for a hole."""
        whole = self._wholes[name]
        shape = whole.shape
        if whole.flattened is not None:
            return self._put_together(name, whole, whole.flattened)[slice(*(rows or (None, None)))]
        first, last = rows or (0, shape[0] if shape else 0)
        wanted = (last - first, *shape[1:]) if shape else ()
        result, filled = None, 0
        for chunk in whole.chunks:
            shard, offsets = self._shard(whole, chunk)
            if not shape:
                return shard
            start, stop = max(first, offsets[0]), min(last, offsets[0] + shard.shape[0])
            if start >= stop:
                continue
            shard = shard[start - offsets[0] : stop - offsets[0]]
            if shard.shape == wanted:
                return shard
            if result is None:
                result = torch.empty(wanted, dtype=whole.stored.dtype)
            region = (
                slice(start - first, stop - first),
                *(slice(o, o + n) for o, n in zip(offsets[1:], shard.shape[1:], strict=True)),
            )
            result[region] = shard
            filled += shard.numel()
        if result is None:
            result = torch.empty(wanted, dtype=whole.stored.dtype)
        self._require_filled(name, filled, result)
        return result

    def release(self, name: str) -> None:
        """Let go of the memory that reading ``name`` took."""
        for chunk in self._wholes[name].chunks:
            self._map(chunk.file).release(chunk.offset, chunk.length)

    def _put_together(self, name: str, whole: _Whole, flattened: Flattened) -> Tensor:
        tensor, filled = flattened.put_together(
            whole.chunks, whole.stored.dtype, lambda chunk: self._chunk(chunk, whole.stored.dtype)
        )
        self._require_filled(name, filled, tensor)
        return tensor

    def _require_filled(self, name: str, filled: int, tensor: Tensor) -> None:
        if filled != tensor.numel():
            raise CheckpointError(
                f"{self.folder} holds {filled} of the {tensor.numel()} numbers of {name}: it is not "
                "complete. Give another checkpoint"
            )

    def _add(
        self, stored_key: str, stored: StoredTensor, kind: str | None = None, key: str | None = None
    ) -> None:
        key = key or stored_key
        shape = self.contents.reformulated.get(stored_key, stored.shape)
        lead, names = names_of(key, shape)
        flattened = None
        if shape is not stored.shape:
            flattened = Flattened(shape=shape, shards=stored.shape[:-1], lead=lead)
        chunks: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for chunk in stored.chunks:
            spans = zip(chunk.offsets[:lead], chunk.sizes[:lead], strict=True)
            for index in itertools.product(*(range(o, o + n) for o, n in spans)):
                chunks[index].append(chunk)
        for index, weight in names:
            name = state_name(kind, weight)
            if name in self._wholes:
                raise CheckpointError(f"{self.folder} holds {name} twice, once as {key}; give another one")
            if index not in chunks:
                raise CheckpointError(f"{self.folder} lacks {name}, which {key} should hold; it is damaged")
            self._wholes[name] = _Whole(
                stored=stored, index=index, chunks=tuple(chunks[index]), flattened=flattened
            )

    def _shard(self, whole: _Whole, chunk: Chunk) -> tuple[Tensor, tuple[int, ...]]:
        """The part of ``chunk`` that is of ``whole``, and its offsets in it."""
        lead = len(whole.index)
        tensor = self._chunk(chunk, whole.stored.dtype)
        within = tuple(i - o for i, o in zip(whole.index, chunk.offsets[:lead], strict=True))
        return tensor[within], chunk.offsets[lead:]

    def _chunk(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        mapped = self._map(chunk.file)
        found = locate(mapped, chunk.offset, chunk.length)
        if found is not None and (found.dtype, found.shape) == (dtype, chunk.sizes):
            return mapped.tensor(found.offset, dtype, chunk.sizes)
        # Not contiguous, or of a dtype that has no storage of its own.
        stream = io.BytesIO(mapped.bytes(chunk.offset, chunk.length))
        try:
            tensor = torch.load(stream, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{self.folder / chunk.file} is damaged at {chunk.offset}: {error}. Give another checkpoint"
            ) from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.sizes or tensor.dtype != dtype:
            raise CheckpointError(
                f"{self.folder / chunk.file} holds at {chunk.offset} something else than its metadata says; "
                "give another checkpoint"
            )
        return tensor

    def _map(self, file: str) -> MappedFile:
        with self._lock:
            if file not in self._maps:
                self._maps[file] = MappedFile(self.folder / file)
            return self._maps[file]


# Offsets of tensor data in an archive of ``torch.save``, of any version of torch. An archive is a zip of
# stored members: a pickle that describes the tensor, and its bytes. The pickle is read with names alone;
# nothing in it is called.

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
