"""Comparison of texts over all ranks by sums of integers: every rank comes to the same answer."""

from __future__ import annotations

import hashlib


def digest_of(text: str) -> int:
    """24 bits: the squares of 30,000 ranks' digests add up within 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=3).digest(), "big")


def squared(digest: int) -> list[int]:
    """Terms of one rank: what is summed over all of them for ``are_equal``."""
    return [digest, digest * digest]


def are_equal(digests: int, squares: int, ranks: int) -> bool:
    """True where the digests are equal whose sum, and sum of squares, over ``ranks`` these are. No digest of
    one rank is compared, so every rank comes to the same answer."""
    return digests * digests == ranks * squares
