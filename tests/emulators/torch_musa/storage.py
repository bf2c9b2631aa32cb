"""Device memory: host storages that torch takes for a PrivateUse1 device's, and their byte counts."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import torch

from . import refusals

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ROUND = 512
_SEGMENT = 2 << 20
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_EXTENSION_DEVICE = 12  # kDLExtDev, which torch maps to PrivateUse1
_BYTE = (1, 8, 1)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Counters:
    """Bytes as a caching allocator counts them: allocations in steps of 512, segments of 2 MiB."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.blocks = self.peak_blocks = self.total_blocks = self.total_bytes = self.freed_bytes = 0
        self.limit: int | None = None

    def take(self, size: int) -> None:
        with self.lock:
            if self.limit is not None and self.allocated + size > self.limit:
                raise torch.OutOfMemoryError(
                    f"MUSA out of memory (emulated): tried to allocate {size} bytes, {self.allocated} of the "
                    f"{self.limit} that this process may use are taken"
                )
            self.allocated += size
            self.total_bytes += size
            self.blocks += 1
            self.total_blocks += 1
            self.reserved = max(self.reserved, _rounded(self.allocated, _SEGMENT))
            self.peak_allocated = max(self.peak_allocated, self.allocated)
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            self.peak_blocks = max(self.peak_blocks, self.blocks)

    def give_back(self, size: int) -> None:
        # No lock: it may run in a destructor, in the middle of take().
        self.allocated -= size
        self.freed_bytes += size
        self.blocks -= 1

    def empty_cache(self) -> None:
        with self.lock:
            self.reserved = _rounded(self.allocated, _SEGMENT)

    def reset_peaks(self) -> None:
        with self.lock:
            self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
            self.peak_blocks = self.blocks


counters = Counters()


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


class _Block:
    """The host memory of one device storage. The storage's Python object holds it, and torch keeps
    that object for as long as the storage lives."""

    def __init__(self, host: torch.UntypedStorage) -> None:
        self.host = host
        self.size = _rounded(host.nbytes(), _ROUND)
        self._counted = False
        counters.take(self.size)
        self._counted = True
        self.shape = (ctypes.c_int64 * 1)(host.nbytes())
        self.managed = _DLManagedTensor(
            _DLTensor(
                host.data_ptr(),
                _DLDevice(_EXTENSION_DEVICE, 0),
                1,
                _DLDataType(*_BYTE),
                self.shape,
                None,
                0,
            ),
            None,
            None,
        )

    def __del__(self) -> None:
        if self._counted:
            counters.give_back(self.size)


_blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
"""By address."""


def device_storage(host: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage on ``musa:0`` over the memory of ``host``, without a copy."""
    block = _Block(host)
    capsule = _new_capsule(ctypes.addressof(block.managed), b"dltensor", None)
    storage = torch._C._from_dlpack(capsule).untyped_storage()
    storage.block = block  # type: ignore[attr-defined]
    if host.nbytes():
        _blocks[host.data_ptr()] = block
    return storage


def host_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The host memory under a storage on the device."""
    block = getattr(storage, "block", None)
    if block is None:
        # torch's C++ made another storage over the same memory, to write it to a file.
        block = _blocks[storage.data_ptr()]
    host: torch.UntypedStorage = block.host
    return host


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of ``tensor``, with its shape and strides."""
    view = torch.empty(0, dtype=tensor.dtype).set_(
        host_of(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    if tensor.is_conj():
        view = torch._conj(view)
    return torch._neg_view(view) if tensor.is_neg() else view


def place(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, shape: Any, stride: Any) -> None:
    """Make ``tensor`` look at ``storage``."""
    # The CPU kernel only writes metadata, and there is none for this device.
    _set_storage.redispatch(_CPU, tensor, storage, offset, shape, stride)


def on_device(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any
) -> torch.Tensor:
    """A tensor on ``musa:0`` over a storage that is there."""
    refusals.float64(dtype)
    tensor: torch.Tensor = torch._C._acc.create_empty_tensor((0,), dtype)
    place(tensor, storage, offset, shape, stride)
    return tensor


def moved(host: torch.Tensor) -> torch.Tensor:
    """``host`` (a CPU tensor that nobody else holds) as a tensor of the device."""
    return on_device(
        device_storage(host.untyped_storage()), host.dtype, host.storage_offset(), host.shape, host.stride()
    )


def allocate(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory on the device."""
    extent = 0
    if all(shape):
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    storage = device_storage(torch.UntypedStorage(extent * dtype.itemsize))
    return on_device(storage, dtype, 0, shape, stride)
