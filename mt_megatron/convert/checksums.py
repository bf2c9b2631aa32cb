"""CRC-32 of concatenated data from the CRC-32 of its two parts, so that no byte is summed twice.

A CRC is the remainder of a polynomial over GF(2); bytes that follow multiply it by a power of x
(Mark Adler's note on crc32_combine in zlib).
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X = 1 << 30


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of A followed by B, from that of A, that of B, and B's ``length`` in bytes."""
    return _product(_power(length), first) ^ second


@lru_cache(maxsize=65536)
def _power(length: int) -> int:
    """x to the number of bits of ``length`` bytes, modulo the polynomial."""
    result, square, rest = _ONE, _X, 8 * length
    while rest:
        if rest & 1:
            result = _product(square, result)
        square = _product(square, square)
        rest >>= 1
    return result


def _product(a: int, b: int) -> int:
    """The product of two polynomials, whose highest bits are the lowest powers."""
    product = 0
    for shift in range(31, -1, -1):
        if a >> shift & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
