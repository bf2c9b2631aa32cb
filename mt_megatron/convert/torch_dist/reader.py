"""A distributed checkpoint (``torch_dist``) read tensor by tensor, without process groups and at any layout.

Tensors are named as in an unsharded model of local layers, those of an optimizer after them.
"""

from __future__ import annotations

import io
import itertools
import pickle
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mt_megatron.convert.hf.weights import Kept
from mt_megatron.convert.tensors.mapped_file import MappedFile
from mt_megatron.convert.tensors.megatron_names import names_of, split_state_key
from mt_megatron.convert.tensors.state_names import kind_of, state_name
from mt_megatron.convert.tensors.table import listed
from mt_megatron.convert.torch_dist.flattened import Flattened
from mt_megatron.convert.torch_dist.metadata import Chunk, StoredTensor, read_metadata
from mt_megatron.convert.torch_dist.torch_archive import locate
from mt_megatron.errors import CheckpointError

_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "opt_param_scheduler")


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
        kept = {name: Kept(dtype=each.stored.dtype, shape=each.shape) for name, each in self._wholes.items()}
        self.tensors: Mapping[str, Kept] = {
            name: each for name, each in kept.items() if kind_of(name) is None
        }
        self.state: Mapping[str, Kept] = {
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
            piece, offsets = self._piece(whole, chunk)
            if not shape:
                return piece
            start, stop = max(first, offsets[0]), min(last, offsets[0] + piece.shape[0])
            if start >= stop:
                continue
            piece = piece[start - offsets[0] : stop - offsets[0]]
            if piece.shape == wanted:
                return piece
            if result is None:
                result = torch.empty(wanted, dtype=whole.stored.dtype)
            region = (
                slice(start - first, stop - first),
                *(slice(o, o + n) for o, n in zip(offsets[1:], piece.shape[1:], strict=True)),
            )
            result[region] = piece
            filled += piece.numel()
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
            flattened = Flattened(shape=shape, pieces=stored.shape[:-1], lead=lead)
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

    def _piece(self, whole: _Whole, chunk: Chunk) -> tuple[Tensor, tuple[int, ...]]:
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
