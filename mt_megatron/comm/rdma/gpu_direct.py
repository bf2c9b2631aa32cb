"""GPUDirect: rings in a CUDA device's memory, which the adapter reads and writes by dmabuf.

Has not run on hardware yet, so it is taken only where ``MT_MEGATRON_GPU_DIRECT=1`` asks for it, and refused
with the reason where the driver or the adapter offers no dmabuf. Otherwise messages of a device pass through
pinned host memory. Headers stay in host memory, so the receiver reads no device memory to know what arrived.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_megatron.comm.errors import TransportError
from mt_megatron.comm.message import Header
from mt_megatron.comm.rdma.edges import Slot
from mt_megatron.comm.rdma.ports import Unusable
from mt_megatron.comm.rdma.verbs import Bytes, Device
from mt_megatron.comm.shared_memory.tensors import Unwritten, in_rows, is_part
from mt_megatron.comm.transport import Label

VARIABLE = "MT_MEGATRON_GPU_DIRECT"

_PAGE = 1 << 16
"""Alignment that dmabuf exports need on every architecture."""

_DMA_BUF_SUPPORTED = 124
"""``CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED``."""

_HANDLE_TYPE_DMA_BUF = 1
"""``CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD``."""

_FLUSH_TARGET_CURRENT_CONTEXT, _FLUSH_TO_OWNER = 0, 100
"""``CU_FLUSH_GPU_DIRECT_RDMA_WRITES_...``: what arrived is visible to the device's own work."""


def open_direct(
    device: torch.device, adapter: Device, *, crc: bool, environ: Mapping[str, str] = os.environ
) -> DirectMemory | None:
    """What makes rings in ``device``'s memory; None if that was not asked for.

    Raises Unusable with the reason if it was asked for and cannot be.
    """
    if environ.get(VARIABLE, "0") != "1":
        return None
    change = f"unset {VARIABLE}: messages then pass through pinned host memory"
    if device.type != "cuda":
        raise Unusable(f"{VARIABLE}=1, and the tensors are on {device}, not on CUDA", change)
    if crc:
        raise Unusable(f"{VARIABLE}=1, and a CRC needs the bytes on the host", change)
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unusable(f"{VARIABLE}=1, and the CUDA driver cannot be loaded: {error}", change) from error
    memory = DirectMemory(device, adapter, library)
    if not memory.is_supported():
        raise Unusable(f"{VARIABLE}=1, and the driver exports no memory of {device} by dmabuf", change)
    return memory


class DirectMemory:
    """Memory of one CUDA device, and a stream for copies between it and the rings."""

    def __init__(self, device: torch.device, adapter: Device, library: Any) -> None:
        """``library``: the CUDA driver's."""
        self.device = device
        self._adapter = adapter
        self._library = library
        self._stream = torch.cuda.Stream(device)

    def is_supported(self) -> bool:
        """Whether the driver can export the device's memory."""
        value, ordinal = ctypes.c_int(0), ctypes.c_int(0)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        if self._library.cuDeviceGet(ctypes.byref(ordinal), index):
            return False
        failed = self._library.cuDeviceGetAttribute(ctypes.byref(value), _DMA_BUF_SUPPORTED, ordinal)
        return not failed and bool(value.value)

    def region(self, nbytes: int) -> DirectRegion:
        """Registered memory of the device. Raises Unusable."""
        # The allocator's blocks are not aligned to pages.
        length = -(-nbytes // _PAGE) * _PAGE
        whole = torch.zeros(length + _PAGE, dtype=torch.uint8, device=self.device)
        start = -whole.data_ptr() % _PAGE
        tensor = whole[start : start + length]
        torch.cuda.synchronize(self.device)
        descriptor = ctypes.c_int(-1)
        with torch.cuda.device(self.device):
            code = self._library.cuMemGetHandleForAddressRange(
                ctypes.byref(descriptor),
                ctypes.c_uint64(tensor.data_ptr()),
                ctypes.c_size_t(length),
                ctypes.c_int(_HANDLE_TYPE_DMA_BUF),
                ctypes.c_ulonglong(0),
            )
        if code:
            raise Unusable(
                f"{length} bytes of {self.device} cannot be exported by dmabuf (CUDA error {code})",
                f"unset {VARIABLE}",
            )
        try:
            return DirectRegion(tensor, self._adapter.register_dmabuf(descriptor.value, length))
        finally:
            # The registration keeps what it needs.
            os.close(descriptor.value)

    def stream(self) -> Any:
        """The caller's current stream."""
        return torch.cuda.current_stream(self.device)

    def mark(self, stream: Any = None) -> Any:
        """Event behind what is queued on ``stream`` (None: the current one)."""
        event = torch.cuda.Event()
        event.record(self.stream() if stream is None else stream)
        return event

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Any) -> tuple[Tensor, Any]:
        """Memory of ``stream``, and the event behind which it may be written: what had it before may still be
        in use by work queued there."""
        with torch.cuda.stream(stream):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return tensor, self.mark(stream)

    def copy(self, target: Tensor, source: Tensor, after: Any) -> None:
        """Copy bytes behind the event ``after``; complete on return."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            self._stream.synchronize()

    def flush(self) -> None:
        """Make the adapter's writes visible to work of the device that is queued from now on."""
        with torch.cuda.device(self.device):
            # The context of a thread comes with its first runtime call that needs one. torch.cuda.device
            # makes none where its device is the current one. The flush fails without a context (201).
            self._stream.query()
            code = self._library.cuFlushGPUDirectRDMAWrites(_FLUSH_TARGET_CURRENT_CONTEXT, _FLUSH_TO_OWNER)
        if code:
            raise TransportError(
                f"what the adapter wrote cannot be made visible to {self.device} (CUDA error {code}); unset "
                f"{VARIABLE}"
            )


class DirectRegion:
    """See ``verbs.Region``; ``tensor`` is the memory."""

    extra = ""

    def __init__(self, tensor: Tensor, registered: Any) -> None:
        self.tensor = tensor
        self.address = 0  # Peers name bytes by their offset in the dmabuf.
        self.nbytes = tensor.nbytes
        self.local_key = registered.lkey
        self.remote_key = registered.rkey
        self._registered = registered

    @property
    def bytes(self) -> Bytes:
        raise AssertionError("memory of a device is not the host's to read")

    def close(self) -> None:
        self._registered.close()


class DirectSource:
    """See ``edges.Source``."""

    def __init__(self, tensor: Tensor, label: Label, memory: DirectMemory) -> None:
        self.waits = True
        self._tensor = in_rows(tensor)
        self._unwritten = Unwritten(self._tensor, tensor)
        self._bytes = self._tensor.reshape(-1).view(torch.uint8)
        self.nbytes = self._bytes.numel()
        self._label = label
        self._memory = memory
        self._ready = memory.mark()

    def await_device(self) -> None:
        self._ready.synchronize()
        self.waits = False

    def header(self, sequence: int) -> bytes:
        return Header(sequence, self._tensor.dtype, tuple(self._tensor.shape), self._label).encode()

    def read(self, offset: int, slot: Slot, nbytes: int) -> None:
        target = _memory_of(slot)[slot.offset : slot.offset + nbytes]
        self._memory.copy(target, self._bytes[offset : offset + nbytes], self._ready)

    def hold(self) -> None:
        """Nothing: a copy would need memory of the device, and a part of a storage has no guard."""

    def finish(self, target: int) -> None:
        if not is_part(self._tensor):
            self._unwritten.require(target)


class DirectSink:
    """See ``edges.Sink``."""

    def __init__(self, target: Tensor, memory: DirectMemory, ready: Any) -> None:
        """``ready``: event behind which ``target`` may be written."""
        self.nbytes = target.nbytes
        self._bytes = target.reshape(-1).view(torch.uint8)
        self._memory = memory
        self._ready = ready

    def write(self, offset: int, slot: Slot, nbytes: int) -> None:
        self._memory.flush()
        source = _memory_of(slot)[slot.offset : slot.offset + nbytes]
        self._memory.copy(self._bytes[offset : offset + nbytes], source, self._ready)

    def finish(self) -> None:
        """Nothing: there is no CRC."""


def _memory_of(slot: Slot) -> Tensor:
    assert isinstance(slot.region, DirectRegion)
    return slot.region.tensor
