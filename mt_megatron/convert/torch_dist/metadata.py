"""The ``.metadata`` of a distributed checkpoint: a pickle, of which only plain descriptions are taken.

torch writes which tensors there are, in which chunks, and where each lies as a pickled ``Metadata``.
Unpickling calls what the file names, so everything but torch's own descriptions is refused.
"""

from __future__ import annotations

import enum
import importlib
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mt_megatron.convert.folders import METADATA
from mt_megatron.errors import CheckpointError

_PLANNER = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[str, tuple[str, ...]] = {
    _PLANNER: (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    # Where it was written: a path is only a name here.
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A whole tensor of a distributed checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """Serialised bytes of a distributed checkpoint."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a distributed checkpoint holds, by key."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    reformulated: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Flattened optimizer states: the shape that each had, by key."""


def read_metadata(folder: Path) -> Contents:
    """The contents of the distributed checkpoint in ``folder``. Raises ``CheckpointError``."""
    path = folder / METADATA
    try:
        with open(path, "rb") as stream:
            metadata = _Plain(stream).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {METADATA}: it is no distributed checkpoint of the form torch_dist"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises anything)
        raise CheckpointError(f"{path} is damaged: {error!r}. Give another checkpoint") from error
    try:
        return _contents(metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not laid out as torch {torch.__version__} lays it out: {error!r}. Give a checkpoint "
            "that a tested version wrote"
        ) from error


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            if module.startswith("pathlib"):
                # A foreign system's path could not be made here.
                return lambda *parts: "/".join(map(str, parts))
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 write members of enumerations by name.
            return _member
        raise CheckpointError(
            f"{METADATA} asks for {module}.{name}, which no description of tensors needs: it is not read. "
            "Load only checkpoints that you trust"
        )


def _member(kind: Any, name: Any) -> Any:
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind[name]
    raise CheckpointError(
        f"{METADATA} asks for {name!r} of {kind!r}, which no description of tensors needs: it is not read. "
        "Load only checkpoints that you trust"
    )


def _contents(metadata: Any) -> Contents:
    found = Contents()
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = []
            for chunk in entry.chunks:
                info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                _require_plain(key, info)
                chunks.append(
                    Chunk(
                        offsets=tuple(chunk.offsets),
                        sizes=tuple(chunk.sizes),
                        file=info.relative_path,
                        offset=info.offset,
                        length=info.length,
                    )
                )
            found.tensors[key] = StoredTensor(
                dtype=entry.properties.dtype, shape=tuple(entry.size), chunks=tuple(chunks)
            )
        else:
            info = metadata.storage_data[MetadataIndex(key)]
            _require_plain(key, info)
            found.objects[key] = StoredObject(file=info.relative_path, offset=info.offset, length=info.length)
    for key, more in (getattr(metadata, "mcore_data", None) or {}).items():
        shape = more.get("nd_reformulated_orig_global_shape")
        if shape is not None:
            found.reformulated[key] = tuple(shape)
    return found


def _require_plain(key: str, info: Any) -> None:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{key} was written with {info.transform_descriptors}, which is not read; save the checkpoint "
            "without compression"
        )
    if Path(info.relative_path).name != info.relative_path:
        raise CheckpointError(f"{key} lies in {info.relative_path!r}, expected a file beside {METADATA}")
