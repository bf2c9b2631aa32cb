"""The safetensors file format: its header read with every bound checked, and written for streaming.

Eight bytes with the header's length, a JSON header (name -> dtype, shape, offsets into the rest), then
the tensors' bytes without gaps (github.com/huggingface/safetensors, README, "Format"). No code is in it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mt_megatron.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""

    length: int
    """Bytes."""


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of the file ``path``. Raises ``CheckpointError`` when it is no safetensors file, names
    a dtype that is not among ``DTYPES``, or was cut short."""
    try:
        with open(path, "rb") as stream:
            size = path.stat().st_size
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise CheckpointError(_damaged(path, f"its header would have {length} bytes of {size}"))
            header = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(_damaged(path, str(error))) from error
    if not isinstance(header, dict):
        raise CheckpointError(_damaged(path, "its header is no object"))
    header.pop("__metadata__", None)
    found = {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}
    end = max((each.offset + each.length for each in found.values()), default=8 + length)
    if end != size:
        raise CheckpointError(_damaged(path, f"it has {size} bytes and its tensors end at {end}"))
    return found


def header_bytes(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The file's beginning, for ``tensors`` (name, dtype, shape) whose bytes follow in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} is {dtype}, which safetensors files cannot hold; use --dtype")
        length = _count(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _stored(path: Path, name: str, entry: Any, start: int, size: int) -> Stored:
    try:
        code, shape = entry["dtype"], tuple(int(each) for each in entry["shape"])
        if isinstance(code, str) and code not in DTYPES:
            raise CheckpointError(
                f"{path} holds {name} as {code}; expected one of {', '.join(DTYPES)}. Give a folder in "
                "bfloat16"
            )
        dtype = DTYPES[code]
        first, last = (int(each) for each in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(_damaged(path, f"the entry of {name} is {entry!r:.200} ({error!r})")) from error
    if min(shape, default=0) < 0 or first < 0 or last - first != _count(shape) * dtype.itemsize:
        raise CheckpointError(_damaged(path, f"the entry of {name} contradicts itself: {entry!r:.200}"))
    if start + last > size:
        raise CheckpointError(_damaged(path, f"{name} would end at {start + last} of {size} bytes"))
    return Stored(dtype=dtype, shape=shape, offset=start + first, length=last - first)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for each in shape:
        count *= each
    return count


def _damaged(path: Path, why: str) -> str:
    return f"{path} is not a whole safetensors file: {why}. Give a complete copy of it"
