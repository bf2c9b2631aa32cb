"""The wire format of protocol buffers, written by hand: varints, 64-bit words, length-prefixed bytes.

Source: the encoding specification at protobuf.dev. Only what ``pftrace`` needs.
"""

from __future__ import annotations

import struct

_DOUBLE = struct.Struct("<d")
_FIXED = struct.Struct("<Q")


def varint(value: int) -> bytes:
    """An unsigned integer, 7 bits a byte, lowest first."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(field: int, value: int) -> bytes:
    """A varint field; negative values as two's complement of 64 bits."""
    return varint(field << 3) + varint(value & 0xFFFFFFFFFFFFFFFF)


def fixed64(field: int, value: int) -> bytes:
    """An unsigned 64-bit field."""
    return varint(field << 3 | 1) + _FIXED.pack(value)


def double(field: int, value: float) -> bytes:
    """A 64-bit floating-point field."""
    return varint(field << 3 | 1) + _DOUBLE.pack(value)


def blob(field: int, value: bytes) -> bytes:
    """Bytes, or a message within the message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """A string field."""
    return blob(field, value.encode())
