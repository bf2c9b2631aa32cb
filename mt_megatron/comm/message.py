"""Header of a message: what the receiver checks and what it builds the tensor from.

The header has a fixed size of 128 bytes, little-endian, and is followed by the tensor's elements in
row-major order. Offsets in bytes:

    0  magic            u32    8  sequence (of the edge)  u64   24  dtype code   u8     28  micro-batch  i32
    4  version          u16   16  bytes of the payload    u64   25  dimensions   u8     32  chunk        i32
    6  flags            u16                                     26  direction    i16    36  CRC-32       u32
   40  sizes            8 x i64                                104  zeros        20 x u8
  124  CRC-32 of the bytes before                          u32
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mt_megatron.comm.errors import MessageMismatch
from mt_megatron.comm.transport import UNLABELLED, Edge, Label
from mt_megatron.errors import MtMegatronError

HEADER_BYTES = 128
MOST_DIMS = 8

_MAGIC = 0x434D544D  # "MTMC"
_VERSION = 1
_FRONT = struct.Struct(f"<IHHQQBBhiiI{MOST_DIMS}q20x")
_CRC = struct.Struct("<I")
_NO_SIZES = tuple((0,) * (MOST_DIMS - dims) for dims in range(MOST_DIMS + 1))

HAS_CRC = 1
"""Flag: the payload's CRC-32 is in the header."""

_NAMES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
    "complex64",
    "complex128",
    "complex32",
    "float4_e2m1fn_x2",
)
"""In the order of their codes, from 1: part of the format, so only ever appended to."""

_DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(_NAMES, 1) if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Header(NamedTuple):
    """What is known of a message before its elements. Made for every message: a tuple is made fastest."""

    sequence: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    label: Label = UNLABELLED
    crc: int | None = None
    """CRC-32 (``zlib.crc32``) of the payload, or None."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def encode(self) -> bytes:
        """128 bytes. Raises MtMegatronError for a dtype or a number of dimensions that has no code."""
        code = _CODES.get(self.dtype)
        if code is None:
            raise MtMegatronError(
                f"found a tensor of {self.dtype} to send; expected one of {', '.join(_NAMES)}; send a view "
                "of it in another dtype"
            )
        if len(self.shape) > MOST_DIMS:
            raise MtMegatronError(
                f"found a tensor of {len(self.shape)} dimensions to send; expected at most {MOST_DIMS}; "
                "flatten it"
            )
        front = _FRONT.pack(
            _MAGIC,
            _VERSION,
            0 if self.crc is None else HAS_CRC,
            self.sequence,
            self.nbytes,
            code,
            len(self.shape),
            self.label.direction,
            self.label.micro_batch,
            self.label.chunk,
            self.crc or 0,
            *self.shape,
            *_NO_SIZES[len(self.shape)],
        )
        return front + _CRC.pack(zlib.crc32(front))

    @staticmethod
    def decode(encoded: bytes | memoryview) -> Header:
        """Inverse of ``encode``. Raises MessageMismatch for what no ``encode`` of this version wrote."""
        front = encoded[: _FRONT.size]
        (crc,) = _CRC.unpack_from(encoded, _FRONT.size)
        (
            magic,
            version,
            flags,
            sequence,
            nbytes,
            code,
            dims,
            direction,
            micro_batch,
            chunk,
            payload_crc,
            *sizes,
        ) = _FRONT.unpack(front)
        if magic != _MAGIC or crc != zlib.crc32(front):
            raise MessageMismatch(
                f"128 bytes that are no message header arrived (they begin with {bytes(front[:8]).hex()}); "
                "both ranks must run the same version of mt_megatron"
            )
        if version != _VERSION:
            raise MessageMismatch(
                f"a message of format {version} arrived; expected format {_VERSION}: both ranks must run "
                "the same version of mt_megatron"
            )
        if code not in _DTYPES or dims > MOST_DIMS:
            raise MessageMismatch(
                f"a message of dtype code {code} and {dims} dimensions arrived; this torch has no such "
                "dtype: both ranks must run the same version of torch"
            )
        header = Header(
            sequence,
            _DTYPES[code],
            tuple(sizes[:dims]),
            Label(micro_batch, chunk, direction),
            payload_crc if flags & HAS_CRC else None,
        )
        if header.nbytes != nbytes or min(header.shape, default=0) < 0:
            raise MessageMismatch(f"a message of {nbytes} bytes says that its shape is {header.shape}")
        return header

    def require(
        self,
        edge: Edge,
        *,
        sequence: int,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        label: Label = UNLABELLED,
    ) -> None:
        """Raise MessageMismatch unless this is the message that the receiver asked for."""
        if (
            self.sequence == sequence
            and self.dtype == dtype
            and (shape is None or self.shape == tuple(shape))
            and self.label.agrees(label)
        ):
            return
        wrong = []
        if self.sequence != sequence:
            wrong.append(f"number {self.sequence} instead of {sequence}")
        if shape is not None and self.shape != tuple(shape):
            wrong.append(f"shape {self.shape} instead of {tuple(shape)}")
        if self.dtype != dtype:
            wrong.append(f"{self.dtype} instead of {dtype}")
        if not self.label.agrees(label):
            wrong.append(f"{self.label} instead of {label}")
        if wrong:
            raise MessageMismatch(
                f"rank {edge.target} received from rank {edge.source}, lane {edge.lane}, a message of "
                f"{', '.join(wrong)}; both ranks must run the same schedule and configuration"
            )

    def require_crc(self, edge: Edge, payload: bytes | memoryview) -> None:
        """Raise MessageMismatch unless ``payload`` has the header's CRC-32, if it has one."""
        if self.crc is None:
            return
        found = zlib.crc32(payload)
        if found != self.crc:
            raise MessageMismatch(
                f"message {self.sequence} from rank {edge.source} to rank {edge.target}, lane {edge.lane}, "
                f"has the CRC-32 {found:08x} where the sender computed {self.crc:08x}: its {self.nbytes} "
                "bytes were damaged on the way; report this with the machine and its kernel"
            )
