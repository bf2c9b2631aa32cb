"""Bodies of binary answers: a JSON header and raw arrays that a browser maps without a copy.

    u4 length of the header, little endian
    header: JSON, UTF-8, padded with spaces so that the arrays begin at a multiple of 8
    arrays one after another, each padded to a multiple of 8

``header["arrays"]`` lists name, dtype, shape and offset (from the end of the header) of each.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTENT_TYPE = "application/vnd.mt-scope.pack"

_LENGTH = struct.Struct("<I")
_DTYPES = ("float32", "float64", "int32", "uint32", "int16", "uint16", "uint8")


def pack(facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """One body. int64 is sent as float64, exact below 2^53; bool as uint8. Raises ``TypeError`` for other
    dtypes than ``_DTYPES``."""
    rows: list[dict[str, Any]] = []
    parts: list[bytes] = []
    offset = 0
    for name, given in arrays.items():
        array = _sent(given)
        rows.append({"name": name, "dtype": array.dtype.name, "shape": array.shape, "offset": offset})
        data = array.tobytes()
        parts.append(data + bytes(-len(data) % 8))
        offset += len(parts[-1])
    header = json.dumps({**finite(dict(facts)), "arrays": rows}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + _LENGTH.size) % 8)
    return b"".join([_LENGTH.pack(len(header)), header, *parts])


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and arrays of ``body``."""
    (length,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + length
    header: dict[str, Any] = json.loads(body[_LENGTH.size : start])
    arrays = {}
    for row in header.pop("arrays"):
        count = math.prod(row["shape"])
        found = np.frombuffer(body, row["dtype"], count=count, offset=start + row["offset"])
        arrays[row["name"]] = found.reshape(row["shape"])
    return header, arrays


def finite(value: Any) -> Any:
    """``value`` with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return finite(value.item())
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def _sent(array: NDArray[Any]) -> NDArray[Any]:
    found = np.asarray(array)
    if found.dtype == np.int64:
        found = found.astype(np.float64)
    elif found.dtype == np.bool_:
        found = found.astype(np.uint8)
    elif found.dtype == np.float16:
        found = found.astype(np.float32)
    if found.dtype.name not in _DTYPES:
        raise TypeError(f"found an array of {found.dtype.name}; expected one of {', '.join(_DTYPES)}")
    return np.ascontiguousarray(found, dtype=found.dtype.newbyteorder("<"))
