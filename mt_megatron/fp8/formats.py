"""Number formats of 8 and 4 bits: what they can hold, and rounding to them.

Sources: "FP8 Formats for Deep Learning" (arXiv:2209.05433) for e4m3 and e5m2, the OCP Microscaling
Formats specification 1.0 for e2m1 and E8M0. Values beyond a format's range are clamped before they
are cast, because what a cast does with them differs between torch, ml_dtypes and devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format with gradual underflow."""

    name: str
    """``e4m3``, ``e5m2`` or ``e2m1``."""

    maximum: float
    """The largest finite value."""

    mantissa_bits: int
    """Bits after the leading one."""

    min_exponent: int
    """Exponent of the smallest normal number."""

    bits: int = 8

    dtype: torch.dtype | None = None
    """torch's dtype of the codes; None where torch has no arithmetic for them (e2m1)."""

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        return math.frexp(self.maximum)[1] - 1

    @property
    def relative_error(self) -> float:
        """Half a unit in the last place of a normal number, relative to it: the bound of rounding."""
        return math.ldexp(1.0, -self.mantissa_bits - 1)

    @property
    def absolute_error(self) -> float:
        """Half the smallest value: the bound of rounding below the normal numbers."""
        return self.smallest / 2


E4M3 = Format(name="e4m3", maximum=448.0, mantissa_bits=3, min_exponent=-6, dtype=torch.float8_e4m3fn)
E5M2 = Format(name="e5m2", maximum=57344.0, mantissa_bits=2, min_exponent=-14, dtype=torch.float8_e5m2)
E2M1 = Format(name="e2m1", maximum=6.0, mantissa_bits=1, min_exponent=0, bits=4)

FORMATS: dict[str, Format] = {each.name: each for each in (E4M3, E5M2, E2M1)}

E8M0_BIAS = 127
E8M0_NAN = 255
"""E8M0 has codes 0 to 254 for 2**-127 to 2**127, no sign, no zero and no infinity."""


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Codes of ``x`` (fp32, bf16 or fp16, any shape) after clamping to the format's range, rounded to the
    nearest value, ties to even. Of dtype ``fmt.dtype``; uint8 with the code in the low bits for e2m1.

    NaN stays NaN where the format has one; in e2m1 it becomes zero, and its block's scale must say NaN.
    """
    x = x.clamp(-fmt.maximum, fmt.maximum)
    if fmt.dtype is not None:
        return x.to(fmt.dtype)
    return _e2m1_code(rounded(x.float(), fmt))


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of ``codes``; exact in bf16, as in every wider dtype."""
    if fmt.dtype is not None:
        if codes.device.type == "cpu":
            return _decoded_by_bits(codes, fmt).to(dtype)
        return codes.to(dtype)
    table = torch.tensor(_E2M1_VALUES, dtype=dtype, device=codes.device)
    return table[codes.long()]


def _decoded_by_bits(codes: Tensor, fmt: Format) -> Tensor:
    """``codes.to(torch.bfloat16)``, which takes torch seven times as long on the CPU."""
    signed = codes.view(torch.int8).to(torch.int16)
    if fmt is E5M2:  # the upper half of fp16
        return (signed << 8).view(torch.float16).to(torch.bfloat16)
    if _flushes_denormals():
        return codes.to(torch.bfloat16)
    # Sign, exponent and mantissa where bf16 has them; its exponent counts from 120 further down.
    values = ((signed << 4) & ~0x7800).view(torch.bfloat16) * 2.0**120
    return torch.where(values.abs() > fmt.maximum, torch.nan, values)


def _flushes_denormals() -> bool:
    return not bool(torch.tensor(2.0**-129, dtype=torch.bfloat16) * 2.0**120)


def rounded(x: Tensor, fmt: Format, noise: Tensor | None = None) -> Tensor:
    """``x`` (fp32, within the format's range) rounded to values of ``fmt``, as fp32.

    To the nearest, ties to even; with ``noise`` (uniform in [0, 1), like ``x``) stochastically: up with
    the probability of the distance from below, so that the mean over draws is ``x``.
    """
    exponent = (torch.frexp(x).exponent - 1).clamp_min(fmt.min_exponent)
    step = torch.ldexp(torch.ones_like(x), exponent - fmt.mantissa_bits)
    # Exact: a division by a power of two within fp32's range.
    units = x / step
    units = units.round() if noise is None else torch.floor(units + noise)
    return units * step


_E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1_VALUES += [-value for value in _E2M1_VALUES]


def _e2m1_code(values: Tensor) -> Tensor:
    """The code of each value of ``values``, which must be e2m1's."""
    magnitude = values.abs()
    # 0, .5, 1, 1.5, 2, 3, 4, 6: two codes per half below 2, then one per step.
    code = torch.where(magnitude <= 2, magnitude * 2, (magnitude + 4).clamp_max(8) - 2 + (magnitude >= 6))
    code = torch.nan_to_num(torch.where(magnitude == 3, 5.0, torch.where(magnitude == 4, 6.0, code)))
    code = code.clamp_max(7)
    return (code + 8 * torch.signbit(values)).to(torch.uint8)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes a byte along the last dimension, the first in the low half, as NVFP4 kernels read them."""
    low, high = codes[..., ::2], codes[..., 1::2]
    return low | (high << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Codes, one a byte: the inverse of ``pack_e2m1``."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def encode_e8m0(x: Tensor) -> Tensor:
    """uint8 codes of positive ``x``, rounded to the nearest power of two as ml_dtypes does (ties up, and up
    between the two smallest); NaN and what is not positive become NaN."""
    bits = x.float().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # Half way between 2**e and 2**(e + 1) is 1.5 * 2**e; below the normal numbers the code is 0 or 1.
    half = 1 << 22
    code = exponent + torch.where(exponent == 0, (mantissa > half).int(), (mantissa >= half).int())
    valid = (x > 0) & torch.isfinite(x)
    return torch.where(valid, code.clamp(0, 254), E8M0_NAN).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Powers of two, fp32, of uint8 ``codes``."""
    value = torch.ldexp(torch.ones(codes.shape, device=codes.device), codes.int() - E8M0_BIAS)
    return torch.where(codes == E8M0_NAN, torch.nan, value)
