"""Random numbers that depend on a key and on an element's place in the whole tensor, and on nothing else.

The number of element ``i`` under ``key`` is SplitMix64's ``i``-th output from the state ``key`` (Steele,
Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014). So one element gets the same
number on every device, in every layout and in any order, and the generators of training are not touched.

All arithmetic is on integers, or single operations on floats that IEEE 754 rounds in one way: equal to the
bit everywhere.
"""

from __future__ import annotations

import hashlib
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

SEGMENTS = 256
"""Straight pieces of the quantile function in each octave of the probability."""

OCTAVES = 31
"""Tail probabilities are ``u / 2**32`` for a whole ``u`` of 31 bits: octave ``k`` has 2**k <= u < 2**(k + 1).
Normal deviates reach 6.2 in size."""


def key_of(seed: int, *words: object) -> int:
    """A key of 64 bits, other for other seeds and words."""
    text = "\x1f".join([str(seed), *map(str, words)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def bits(key: int, places: Tensor) -> Tensor:
    """64 random bits for each of ``places`` (int64, any shape), as int64."""
    z = places * _signed(_GOLDEN) + _signed((key + _GOLDEN) % 2**64)
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def uniform(key: int, places: Tensor) -> Tensor:
    """float32 in [0, 1), multiples of 2**-24."""
    return _shifted(bits(key, places), 40).to(torch.float32) * 2.0**-24


def normal(key: int, places: Tensor) -> Tensor:
    """float32 standard normal deviates: a sign, and the quantile of a tail probability, interpolated within
    ``SEGMENTS`` pieces of each octave."""
    random = bits(key, places)
    tail = (_shifted(random, 33)).clamp_(min=1)
    start, rise, halves = (each.to(places.device) for each in _table())
    octave = torch.bucketize(tail, _powers().to(places.device), right=True) - 1
    size = torch.ones_like(tail) << octave
    within = tail - size
    # 2**k values in an octave; in short ones several pieces have none.
    scaled = within * SEGMENTS
    piece = octave * SEGMENTS + (scaled >> octave)
    part = (scaled & (size - 1)).to(torch.float32) * halves[octave]
    deviate = start[piece] + part * rise[piece]
    return torch.where((random & 1).bool(), -deviate, deviate)


def drawn(key: int, places: Tensor, share: float) -> Tensor:
    """bool: which of ``places`` a draw of ``share`` (0 to 1) of all elements has."""
    return _shifted(bits(key, places), 11) < round(share * 2**53)


@cache
def _table() -> tuple[Tensor, Tensor, Tensor]:
    """float32 [OCTAVES * SEGMENTS]: size of the deviate at each piece's beginning, and what it changes by
    until its end; [OCTAVES]: 2**-k."""
    quantile = NormalDist().inv_cdf
    start, end = [], []
    for octave in range(OCTAVES):
        for piece in range(SEGMENTS):
            low = 2.0**octave * (1 + piece / SEGMENTS) * 2.0**-32
            high = 2.0**octave * (1 + (piece + 1) / SEGMENTS) * 2.0**-32
            start.append(-quantile(low))
            end.append(-quantile(high))
    first = torch.tensor(start, dtype=torch.float32)
    halves = torch.tensor([2.0**-octave for octave in range(OCTAVES)], dtype=torch.float32)
    return first, torch.tensor(end, dtype=torch.float32) - first, halves


@cache
def _powers() -> Tensor:
    return torch.tensor([2**octave for octave in range(OCTAVES)], dtype=torch.int64)


def _shifted(values: Tensor, count: int) -> Tensor:
    """``values >> count`` as of unsigned numbers."""
    return (values >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
