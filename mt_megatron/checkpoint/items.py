"""Tensors as ``torch.save`` stores them, without calling it for each: a frame per shape, then the bytes.

Each tensor in a torch_dist file is a small zip archive made by ``torch.save``. Making one takes
0.3 ms and holds the interpreter all the while, which a training step beside it would feel. Archives
of one shape and dtype differ in nothing but the bytes and their CRC-32, so one is made per shape; a
thread then only sums and writes large buffers, and both let go of the interpreter.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import CheckpointError

_DESCRIPTOR = b"PK\x07\x08"
_ENTRY = b"PK\x01\x02"
_CRC_IN_ENTRY, _NAME_IN_ENTRY = 16, 46
_DATA = b"/data/0"
_LONG = 1 << 16


@dataclass(frozen=True)
class Frame:
    """What stands before and after a tensor's bytes, and where in the latter their CRC-32 stands."""

    before: bytes
    after: bytes
    crc_at: tuple[int, ...]
    size: int
    """Bytes of the tensor itself."""

    @property
    def total(self) -> int:
        """Bytes of the whole archive."""
        return len(self.before) + self.size + len(self.after)


def pieces(tensor: Tensor) -> list[Any]:
    """The archive of ``tensor`` (on the host, contiguous) as buffers to write one after another.

    The middle one is the tensor's own memory. ``torch.load`` of all reads an equal tensor.
    """
    frame = frame_of(tuple(tensor.shape), tensor.dtype)
    if frame.size == 0:
        return [frame.before]
    content = memory_of(tensor)
    after = bytearray(frame.after)
    for position in frame.crc_at:
        struct.pack_into("<I", after, position, zlib.crc32(content))
    return [frame.before, content, after]


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def frame_of(shape: tuple[int, ...], dtype: torch.dtype) -> Frame:
    """The frame of a contiguous tensor of ``shape``; nothing of its size is allocated for long."""
    example = torch.zeros(shape, dtype=dtype)
    size = example.numel() * example.element_size()
    sink = _Sink(size)
    torch.save(example, sink)  # type: ignore[arg-type]
    written = sink.pieces
    if size == 0:
        return Frame(before=b"".join(written), after=b"", crc_at=(), size=0)
    data = sink.index_of_data()
    before, after = b"".join(written[:data]), b"".join(written[data + 1 :])
    crc = struct.pack("<I", zlib.crc32(memory_of(example)))
    places = (after.find(_DESCRIPTOR) + len(_DESCRIPTOR), _central_crc(after))
    if any(after[place : place + 4] != crc for place in places):
        raise CheckpointError(
            f"this torch ({torch.__version__}) lays out torch.save's archives in a way this version does not "
            "know; use a tested version of torch"
        )
    return Frame(before=before, after=after, crc_at=places, size=size)


def _central_crc(after: bytes) -> int:
    position = after.find(_ENTRY)
    while position >= 0:
        length = struct.unpack_from("<H", after, position + 28)[0]
        name = after[position + _NAME_IN_ENTRY : position + _NAME_IN_ENTRY + length]
        if name.endswith(_DATA):
            return position + _CRC_IN_ENTRY
        position = after.find(_ENTRY, position + 4)
    return 0


class _Sink(io.RawIOBase):
    """Collects what is written; the one record of a tensor's bytes is the one after its name."""

    def __init__(self, size: int) -> None:
        self.pieces: list[bytes] = []
        self._lengths: list[int] = []
        self._size = size

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        view = memoryview(content)
        self._lengths.append(view.nbytes)
        # Nothing but the tensor's bytes is that long, and those are not wanted.
        self.pieces.append(bytes(view) if view.nbytes < _LONG else b"")
        return view.nbytes

    def index_of_data(self) -> int:
        """Which piece is the tensor's bytes: the first of their size after the record's name."""
        name = next((i for i, piece in enumerate(self.pieces) if piece.endswith(_DATA)), None)
        if name is not None:
            for index in range(name + 1, len(self.pieces)):
                # Between them lies padding at most, which starts with its own mark.
                if self._lengths[index] == self._size and not self.pieces[index].startswith(b"FB"):
                    return index
        raise CheckpointError(
            f"this torch ({torch.__version__}) does not write a tensor's bytes in one piece; use a tested "
            "version of torch"
        )
