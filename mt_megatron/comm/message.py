"""Header of a message: what the receiver checks and what it builds the tensor from.

The header has a fixed size of 128 bytes, little-endian, and is followed by the tensor's elements in
row-major order. What differs between the messages of an edge comes first; the description behind it is the
same for all messages of one kind, so both sides keep its coded form. Offsets in bytes:

    0  sequence (of the edge)   u64     24  bytes of the payload  u64    36  direction    i16
    8  CRC-32 of the payload    u32     32  dtype code            u8     38  zero         u16
   12  zero                     u32     33  dimensions            u8     40  micro-batch  i32
   16  magic                    u32     34  zero                  u16    44  chunk        i32
   20  version, flags           2 u16   48  sizes                 8 i64  112 zeros        12 u8
  124  CRC-32 of bytes 16 to 123  u32
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from mt_megatron.comm.errors import MessageMismatch
from mt_megatron.comm.transport import UNLABELLED, Edge, Label
from mt_megatron.errors import MtMegatronError

HEADER_BYTES = 128
MOST_DIMS = 8

_MAGIC = 0x434D544D  # "MTMC"
_VERSION = 1
FRONT = struct.Struct("<QII")
"""Sequence, CRC-32 of the payload (0 without), zero."""

_DESCRIPTION = struct.Struct(f"<IHHQBBHhHii{MOST_DIMS}q12x")
_CRC = struct.Struct("<I")
_MOST_KEPT = 4096
"""Descriptions of which the coded form is kept: micro-batches times shapes."""

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
    """Description of a message, before its elements. Made for every message: a tuple is made fastest."""

    sequence: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    label: Label = UNLABELLED
    crc: int | None = None
    """CRC-32 (``zlib.crc32``) of the payload, or None."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return math.prod(self.shape) * self.dtype.itemsize

    def encode(self) -> bytes:
        """128 bytes. Raises MtMegatronError for a dtype or a number of dimensions that has no code."""
        return encode(self.sequence, self.dtype, self.shape, self.label, self.crc)

    @staticmethod
    def decode(encoded: bytes) -> Header:
        """Inverse of ``encode``. Raises MessageMismatch for what no ``encode`` of this version wrote."""
        sequence, crc, _ = FRONT.unpack_from(encoded)
        dtype, shape, label, has_crc = _described(encoded[FRONT.size :])
        return Header(sequence, dtype, shape, label, crc if has_crc else None)

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


def encode(
    sequence: int, dtype: torch.dtype, shape: tuple[int, ...], label: Label, crc: int | None = None
) -> bytes:
    """``Header(...).encode()`` without making a header."""
    return FRONT.pack(sequence, crc or 0, 0) + description(dtype, shape, label, crc is not None)


@lru_cache(maxsize=_MOST_KEPT)
def description(dtype: torch.dtype, shape: tuple[int, ...], label: Label, has_crc: bool = False) -> bytes:
    """The last 112 bytes of a header: the same for all messages of one kind."""
    code = _CODES.get(dtype)
    if code is None:
        raise MtMegatronError(
            f"found a tensor of {dtype} to send; expected one of {', '.join(_NAMES)}; send a view of it in "
            "another dtype"
        )
    if len(shape) > MOST_DIMS:
        raise MtMegatronError(
            f"found a tensor of {len(shape)} dimensions to send; expected at most {MOST_DIMS}; flatten it"
        )
    coded = _DESCRIPTION.pack(
        _MAGIC,
        _VERSION,
        HAS_CRC if has_crc else 0,
        math.prod(shape) * dtype.itemsize,
        code,
        len(shape),
        0,
        label.direction,
        0,
        label.micro_batch,
        label.chunk,
        *shape,
        *[0] * (MOST_DIMS - len(shape)),
    )
    return coded + _CRC.pack(zlib.crc32(coded))


@lru_cache(maxsize=_MOST_KEPT)
def _described(encoded: bytes) -> tuple[torch.dtype, tuple[int, ...], Label, bool]:
    coded, (crc,) = encoded[:-4], _CRC.unpack(encoded[-4:])
    magic, version, flags, nbytes, code, dims, _, direction, _, micro_batch, chunk, *sizes = (
        _DESCRIPTION.unpack(coded)
    )
    if magic != _MAGIC or crc != zlib.crc32(coded):
        raise MessageMismatch(
            f"128 bytes that are no message header arrived (from byte 16 on: {encoded[:8].hex()}...); both "
            "ranks must run the same version of mt_megatron"
        )
    if version != _VERSION:
        raise MessageMismatch(
            f"a message of format {version} arrived; expected format {_VERSION}: both ranks must run the "
            "same version of mt_megatron"
        )
    if code not in _DTYPES or dims > MOST_DIMS:
        raise MessageMismatch(
            f"a message of dtype code {code} and {dims} dimensions arrived; this torch has no such dtype: "
            "both ranks must run the same version of torch"
        )
    dtype, shape = _DTYPES[code], tuple(sizes[:dims])
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != nbytes:
        raise MessageMismatch(f"a message of {nbytes} bytes says that its shape is {shape}")
    return dtype, shape, Label(micro_batch, chunk, direction), bool(flags & HAS_CRC)
