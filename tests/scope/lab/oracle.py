"""Perturbations computed anew with numpy, one element at a time or by its own operations; knows nothing of
torch."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16, "float64": np.uint64}
WIDTH = {"float32": 32, "bfloat16": 16, "float16": 16, "float64": 64}
_ALL = (1 << 64) - 1


def key(seed: int, *words: object) -> int:
    text = "\x1f".join([str(seed), *(str(word) for word in words)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def splitmix(state: int, count: int) -> int:
    """The ``count``-th output, from 0, of SplitMix64 from ``state``, in Python's integers."""
    z = (state + (count + 1) * 0x9E3779B97F4A7C15) & _ALL
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
    return z ^ (z >> 31)


def uniform(state: int, place: int) -> np.float32:
    return np.float32(splitmix(state, place) >> 40) * np.float32(2.0**-24)


def tail_size(tail: float) -> float:
    """x with P(X > x) = ``tail`` of a standard normal X, by bisection of the complementary error function."""
    low, high = 0.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        if 0.5 * math.erfc(middle / math.sqrt(2)) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


_sizes: dict[tuple[int, int], tuple[np.float32, np.float32]] = {}


def _piece(octave: int, piece: int) -> tuple[np.float32, np.float32]:
    if (octave, piece) not in _sizes:
        ends = [np.float32(tail_size(2.0**octave * (1 + at / 256) / 2.0**32)) for at in (piece, piece + 1)]
        _sizes[octave, piece] = ends[0], ends[1] - ends[0]
    return _sizes[octave, piece]


def normal(state: int, place: int) -> np.float32:
    random = splitmix(state, place)
    tail = max(1, random >> 33)
    octave = tail.bit_length() - 1
    piece, rest = divmod((tail - (1 << octave)) * 256, 1 << octave)
    start, rise = _piece(octave, piece)
    part = np.float32(rest) * np.float32(2.0**-octave)
    size = start + part * rise
    return -size if random & 1 else size


def chosen(entry: dict[str, Any], state: int, place: int) -> bool:
    share = entry.get("fraction")
    return share is None or splitmix(key(state, "share"), place) >> 11 < round(share * 2**53)


def perturbed(
    values: NDArray[Any], name: str, places: NDArray[np.int64], entry: dict[str, Any], state: int
) -> NDArray[Any]:
    """``values`` of the dtype ``name``, each at its place in the whole tensor, changed as ``entry`` says."""
    result = values.copy()
    flat, where = result.reshape(-1), places.reshape(-1)
    for at in range(flat.size):
        place = int(where[at])
        if chosen(entry, state, place):
            flat[at] = _one(flat[at : at + 1], name, place, entry, state)
    return result


def _one(value: NDArray[Any], name: str, place: int, entry: dict[str, Any], state: int) -> Any:
    kind, dtype = entry["kind"], DTYPES[name]
    if kind == "bit_flip":
        bits = value.view(BITS[name]) ^ BITS[name](1 << entry["bit"])
        return bits.view(dtype)[0]
    wide = np.float64 if name == "float64" else np.float32
    x = wide(value[0])
    with np.errstate(all="ignore"):
        if kind == "mask":
            y = wide(0)
        elif kind == "stuck":
            y = wide(entry["value"])
        elif kind == "scale":
            y = x * wide(entry["factor"])
        else:
            noise = wide(_noise(place, entry, state))
            y = x * (noise + wide(1)) if entry.get("relative") else x + noise
        return np.asarray(y, dtype=wide).astype(dtype)[()]


def _noise(place: int, entry: dict[str, Any], state: int) -> np.float32:
    state = key(state, "value")
    if entry["kind"] == "gaussian":
        return normal(state, place) * np.float32(entry["sigma"]) + np.float32(entry.get("mean", 0.0))
    span = np.float32(entry["high"] - entry["low"])
    return uniform(state, place) * span + np.float32(entry["low"])
