"""The ``zarr`` checkpoint format of 0.9.0 on zarr 3: the same files on disk as zarr 2 wrote.

zarr 3 writes its own format unless asked, knows no bfloat16, and dropped ``ProcessSynchronizer``.
Arrays stay in format 2; bfloat16 goes through tensorstore, which Megatron requires for it anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.backends.namespace import ModuleView
from mt_megatron.patches.device.scope import PREFIXES
from mt_megatron.patching.spec import Patch


class _ProcessSynchronizer:
    """zarr 2's lock between processes that write parts of one chunk; here a file lock."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        import fcntl

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Array:
    """The part of a zarr 2 array that Megatron uses, over zarr 3 or tensorstore."""

    def __init__(self, store: Any, path: Path, *, tensorstore: bool) -> None:
        self._store = store
        self._tensorstore = tensorstore
        self._lock = _ProcessSynchronizer(str(path.with_name(path.name + ".sync")))
        self.shape = tuple(store.shape)
        self.dtype = store.dtype.numpy_dtype if tensorstore else store.dtype

    def __getitem__(self, index: Any) -> Any:
        import numpy

        if self._tensorstore:
            return self._store[index].read().result()
        return numpy.asarray(self._store[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._store[index] = value

    def set_coordinate_selection(self, selection: Any, value: Any) -> None:
        # A chunk is read, changed and written back; two ranks may own parts of one.
        with self._lock.locked():
            if self._tensorstore:
                self._store.vindex[selection] = value
            else:
                self._store.set_coordinate_selection(selection, value)


def _open_bfloat16(path: Path, **options: Any) -> Any:
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
    return tensorstore.open(spec, **options).result()


def _create_zarr_array(sharded_tensor: Any, checkpoint_dir: Path) -> _Array:
    import tensorstore
    import torch
    import zarr
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.strategies.zarr import torch_to_numpy_dtype_dict

    path = Path(checkpoint_dir) / sharded_tensor.key
    if (path / ".zarray").exists():
        raise CheckpointingException(f"Array {path} already exists")
    chunks = sharded_tensor.max_allowed_chunks()
    if sharded_tensor.dtype == torch.bfloat16:
        metadata = {
            "dtype": "bfloat16",
            "shape": list(sharded_tensor.global_shape),
            "chunks": list(chunks),
            "compressor": None,
            "fill_value": None,
        }
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(path)},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        }
        store = tensorstore.open(spec, create=True).result()
        return _Array(store, path, tensorstore=True)
    array = zarr.create(
        sharded_tensor.global_shape,
        dtype=torch_to_numpy_dtype_dict[sharded_tensor.dtype],
        store=str(path),
        chunks=chunks,
        compressor=None,
        fill_value=None,
        zarr_format=2,
        config={"write_empty_chunks": True},
    )
    return _Array(array, path, tensorstore=False)


def _open_zarr_array_verbose(path: Path, mode: str, **open_kwargs: Any) -> _Array:
    import zarr
    from megatron.core.dist_checkpointing.core import CheckpointingException

    path = Path(path)
    if not (path / ".zarray").exists():
        raise CheckpointingException(f"Array {path} not found")
    declared = json.loads((path / ".zarray").read_text(encoding="utf-8"))["dtype"]
    if declared == "bfloat16":
        return _Array(_open_bfloat16(path, read=True, write=mode != "r"), path, tensorstore=True)
    return _Array(zarr.open_array(str(path), mode=mode, zarr_format=2), path, tensorstore=False)


def _open(path: Any, mode: str = "r", **options: Any) -> _Array:
    return _open_zarr_array_verbose(Path(path), mode, **options)


def _as_version_2(zarr: ModuleType) -> ModuleView:
    return ModuleView(zarr, {"ProcessSynchronizer": _ProcessSynchronizer, "open": _open})


def patches(backend: Backend) -> list[Patch]:
    module = "megatron.core.dist_checkpointing.strategies.zarr"
    requires = {"zarr": ">=3"}
    found = [
        Patch(
            id="zarr.module",
            target="zarr:",
            kind="rebind",
            feature="compat",
            scope=PREFIXES,
            requires=requires,
            reason="zarr 3 has no ProcessSynchronizer and opens no bfloat16",
            body=_as_version_2,
        )
    ]
    for name, body, digest in (
        (
            "_create_zarr_array",
            _create_zarr_array,
            "d3af0669151a27ef91537b22dffa8fb60a2a80a45256e4f1a51e85f242013f7a",
        ),
        (
            "_open_zarr_array_verbose",
            _open_zarr_array_verbose,
            "c137e7fc0b6cf639974fa50a43f80f082e9b72325f08c4d5c4b5aeb46c3ac758",
        ),
    ):
        found.append(
            Patch(
                id=f"zarr.{name.lstrip('_')}",
                target=f"{module}:{name}",
                kind="replace",
                feature="compat",
                requires=requires,
                reason="zarr 3 writes another format unless asked, and knows no bfloat16",
                body=body,
                digest=digest,
            )
        )
    return found
