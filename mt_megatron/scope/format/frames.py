"""Frames between ranks and the node's sidecar: four bytes of length, little endian, then one msgpack map.

Every frame has the key ``k``, its kind. Arrays are msgpack extension 1: a one-byte length and name of the
dtype, one byte of dimensions, each dimension as uint64, then the bytes, C order, little endian. No other
extension is accepted and no object is ever built from a name, so a frame from outside costs memory at most.

Kinds that a rank sends:

======== =============================================================================================
hello    v, rank, world_size, at {tp, pp, dp, cp, ep}, layout {…}, host, pid, session, model {…},
         modules [[path, class name, parameters], …]
step     i, t (ns since the epoch), seconds, loss, grad_norm, lr, tokens, tokens_per_second, memory_bytes,
         skipped, attempt, perturbed (text or None); loss is NaN on ranks that do not know it
schema   id, entries [[path, statistic, length], …]: what the values of ``stats`` frames mean
stats    i, id, attempt, values (float64, the partials of the schema's entries one after another),
         perturbed
tensor   i, path, what, microbatch, index {layer, head …}, shape, offset (of this shard within the whole),
         encoding ("f32", "f16", "q8"), data, scale, low (q8: value = low + scale * code, per row of tiles),
         error (largest absolute error of the encoding), attempt, perturbed
tokens   i, attempt, microbatch, sample, ids, loss, entropy, top_ids, top_logprobs, position (of the first
         token)
back     first, attempt: the run has gone back; the next step is first, what was recorded from it on is
         undone
dropped  frames, bytes (sums since the session's start)
result   id, ok, value or error: the answer to a command
bye
======== =============================================================================================

``attempt``: how often the run has gone back, or made a step beside itself, before this frame; all ranks count
alike, from 0 at the session's start.

Kinds that a sidecar sends to a rank: ``watch`` (requests: list of texts, see ``scope.watch.requests``) to
all ranks of its node, ``command`` (id, do, arguments) to global rank 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgpack
import numpy as np

from mt_megatron.errors import MtMegatronError

VERSION = 1

MOST_BYTES = 64 * 2**20
"""Of one frame."""

_LENGTH = struct.Struct("<I")
_ARRAY = 1
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "uint8", "int8", "bool")
}

_NAMES = {np.dtype(name): name for name in _DTYPES}
"""A dtype's own ``name`` takes as long as packing a small array."""


class FrameError(MtMegatronError):
    """Bytes that are no frame."""


def encode(frame: Mapping[str, Any]) -> bytes:
    """Length and msgpack map of ``frame``. Raises ``FrameError`` above ``MOST_BYTES``, and for values that
    are neither plain nor arrays."""
    try:
        # File names and the user's texts may hold what UTF-8 has no bytes for.
        packed = msgpack.packb(dict(frame), default=_pack, use_bin_type=True, unicode_errors="replace")
        body = cast(bytes, packed)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"a frame of kind {frame.get('k')!r} cannot be encoded: {error}") from error
    if len(body) > MOST_BYTES:
        raise FrameError(f"found a frame of {len(body):,} bytes; expected at most {MOST_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> dict[str, Any]:
    """Frame of ``body``, the bytes after the length. Raises ``FrameError``."""
    try:
        found = msgpack.unpackb(
            body,
            ext_hook=_unpack,
            raw=False,
            strict_map_key=True,
            max_map_len=65_536,
            max_array_len=2**20,
        )
    except FrameError:
        raise
    except Exception as error:  # msgpack raises several kinds for what is damaged
        raise FrameError(f"found bytes that are no frame: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("k"), str):
        raise FrameError("found a message without a kind; expected a map with the key 'k'")
    return cast(dict[str, Any], found)


class Decoder:
    """Frames of a byte stream that arrives in pieces."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._buffer = bytearray()

    def feed(self, piece: bytes | memoryview) -> Iterator[dict[str, Any]]:
        """Frames that ``piece`` completes. Raises ``FrameError``; the stream cannot be continued then."""
        self._buffer += piece
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._most:
                raise FrameError(f"found a frame of {length:,} bytes; expected at most {self._most:,}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield decode(body)


def _pack(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype) or value.dtype.name
        if name not in _DTYPES:
            raise TypeError(f"found an array of {name}; expected one of {', '.join(_DTYPES)}")
        array = np.ascontiguousarray(value, dtype=_DTYPES[name])
        head = bytes([len(name)]) + name.encode() + bytes([array.ndim])
        return msgpack.ExtType(_ARRAY, head + struct.pack(f"<{array.ndim}Q", *value.shape) + array.tobytes())
    raise TypeError(f"found {type(value).__name__}; expected plain values and numpy arrays")


def _unpack(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise FrameError(f"found msgpack extension {code}; expected {_ARRAY}, an array")
    try:
        end = 1 + data[0]
        dtype = _DTYPES[data[1:end].decode("ascii")]
        dimensions = data[end]
        shape = struct.unpack_from(f"<{dimensions}Q", data, end + 1)
        return np.frombuffer(data, dtype, offset=end + 1 + 8 * dimensions).reshape(shape)
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise FrameError(f"found a damaged array: {type(error).__name__}: {error}") from error
