"""A distributed checkpoint (``torch_dist``) written without process groups or a model.

It is what Megatron-Core writes: files of ``torch.save`` archives behind each other, ``.metadata`` that
says where each lies, ``metadata.json``, and ``common.pt``. The layout decides which shards tensors are
stored in, and which files they share; any other layout reads it all the same.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mt_megatron.checkpoint.items import frame_of, memory_of
from mt_megatron.convert.checksums import combined
from mt_megatron.convert.folders import METADATA
from mt_megatron.convert.output_folder import FileTask, Summed
from mt_megatron.convert.tensors.megatron_names import KeyStyle
from mt_megatron.convert.tensors.shapes import extra_state_of, require_one_dtype, split_axis
from mt_megatron.convert.tensors.shards import Shard, blocks, shards_of
from mt_megatron.convert.tensors.sources import Rows, Source
from mt_megatron.convert.tensors.state_names import kind_of
from mt_megatron.convert.torch_dist.flattened import flat_place, flat_shape


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A shard of a tensor as it is stored."""

    key: str
    shard: Shard
    lead: tuple[int, ...]
    """Its place on the axes before the tensor's own."""

    dtype: torch.dtype
    flat: bool = False
    """Whether it is stored in one dimension, as a distributed optimizer stores its tensors."""

    @property
    def offsets(self) -> tuple[int, ...]:
        return flat_place(self.lead, self.shard)[0] if self.flat else (*self.lead, *self.shard.offsets)

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.flat:
            return flat_place(self.lead, self.shard)[1]
        return (*(1 for _ in self.lead), *self.shard.sizes)

    @property
    def stored(self) -> int:
        return frame_of(self.sizes, self.dtype).total


class DistWriter:
    """The files of a distributed checkpoint, planned from names, shapes and dtypes alone."""

    def __init__(
        self,
        source: Source,
        rows: Rows,
        shapes: Mapping[str, tuple[int, ...]],
        style: KeyStyle,
        *,
        tensor: int,
        groups: Sequence[Sequence[str]],
        distributed: bool = False,
    ) -> None:
        """``shapes`` are of whole tensors with padding; ``groups`` are the names of tensors that share
        a file, in the order of the files; ``distributed`` is the form of an optimizer's tensors."""
        self._source = source
        self._items: dict[str, list[_Item]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._flattened: dict[str, tuple[int, ...]] = {}
        for name, row in rows.items():
            place = style.place(name)
            whole = (*place.axes, *shapes[name])
            shards = shards_of(name, row, shapes[name], split_axis(name), tensor)
            # What has one dimension is flat already.
            flat = distributed and kind_of(name) is not None and len(whole) > 1
            self._sizes[place.key] = flat_shape(place.axes, shapes[name], shards[0]) if flat else whole
            if flat:
                self._flattened[place.key] = whole
            self._items[name] = [
                _Item(key=place.key, shard=shard, lead=place.index, dtype=source.dtype(name), flat=flat)
                for shard in shards
            ]
        require_one_dtype(
            (item.key, name, item.dtype) for name, items in self._items.items() for item in items
        )
        self._groups = [list(group) for group in groups]
        self._states = _extra_states(rows, style)
        self._state = _serialised([None])

    def tasks(self) -> list[FileTask]:
        """The files with tensors; the first has the empty extra states as well."""
        found = []
        for index, group in enumerate(self._groups):
            size = sum(item.stored for name in group for item in self._items[name])
            found.append(
                FileTask(
                    name=_file(index),
                    size=size,
                    produce=lambda index=index, group=group: self._produce(index, group),  # type: ignore[misc]
                )
            )
        return found

    def metadata(self) -> dict[str, bytes]:
        """``.metadata`` and ``metadata.json``, by name."""
        from torch.distributed.checkpoint import metadata as planner
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        entries: dict[str, Any] = {}
        places: dict[Any, Any] = {}
        for index, group in enumerate(self._groups):
            offset = 0
            for name in group:
                for item in self._items[name]:
                    if item.key not in entries:
                        entries[item.key] = planner.TensorStorageMetadata(
                            properties=planner.TensorProperties(dtype=item.dtype),
                            size=torch.Size(self._sizes[item.key]),
                            chunks=[],
                        )
                    entries[item.key].chunks.append(
                        planner.ChunkStorageMetadata(
                            offsets=torch.Size(item.offsets), sizes=torch.Size(item.sizes)
                        )
                    )
                    where = planner.MetadataIndex(item.key, item.offsets)
                    places[where] = _StorageInfo(_file(index), offset, item.stored)
                    offset += item.stored
            for key in self._states if index == 0 else ():
                entries[key] = planner.BytesStorageMetadata()
                places[planner.MetadataIndex(key)] = _StorageInfo(_file(index), offset, len(self._state))
                offset += len(self._state)
        document = planner.Metadata(
            state_dict_metadata=entries,
            planner_data={key: (key,) for key in entries},
            storage_data=places,
        )
        # Megatron-Core's own addition, which it asks for when it loads an optimizer's flattened states.
        document.mcore_data = {  # type: ignore[attr-defined]
            key: {"nd_reformulated_orig_global_shape": self._flattened[key]} if key in self._flattened else {}
            for key, entry in entries.items()
            if isinstance(entry, planner.TensorStorageMetadata)
        }
        backend = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        return {METADATA: pickle.dumps(document), "metadata.json": json.dumps(backend).encode()}

    def _produce(self, index: int, group: Sequence[str]) -> Iterator[Any]:
        for name in group:
            parts = self._source.parts(name)
            for item in self._items[name]:
                yield from _archive(item, blocks(parts, item.shard))
            del parts
            self._source.release(name)
        if index == 0:
            for _ in self._states:
                yield self._state


def _archive(item: _Item, tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    """What ``torch.save`` makes of the tensor that ``tensors`` below each other are, without putting them
    together; nothing is summed twice."""
    frame, crc = frame_of(item.sizes, item.dtype), 0
    yield frame.before
    for tensor in tensors:
        content = memory_of(tensor)
        part = zlib.crc32(content)
        yield Summed(content=content, crc32=part)
        crc = combined(crc, part, len(content))
    after = bytearray(frame.after)
    for position in frame.crc_at:
        struct.pack_into("<I", after, position, crc)
    yield after


def _extra_states(rows: Rows, style: KeyStyle) -> list[str]:
    """Keys of the empty objects that Megatron's linears ask for when they load."""
    keys = []
    for name in rows:
        state = extra_state_of(name, transformer_engine=style.transformer_engine)
        if state is not None:
            place = style.place(state)
            index = ".".join(map(str, place.index or (0,)))
            axes = ".".join(map(str, place.axes or (1,)))
            keys.append(f"{place.key}/shard_{index}_{axes}")
    return keys


def _file(index: int) -> str:
    return f"__{index}_0.distcp"


def _serialised(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
