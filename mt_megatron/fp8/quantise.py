"""Tensors as codes and scales: quantisation along the dimension that a product sums over, and back.

All functions take matrices. A scale multiplies before the cast; its ``inverse`` is what decoded values are
multiplied by. Values decoded from codes and power-of-two or e4m3 block scales are exact in bf16, so the
reference multiplies block scales into the values and keeps only scales per tensor or row (``outer``) for
the product's result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.fp8.device import casts as device_casts
from mt_megatron.fp8.formats import E4M3, FORMATS, Format, decode, encode, rounded
from mt_megatron.fp8.recipe import Cast

TINIEST = 2.0**-100
"""Magnitudes below are scaled as this one is, so that scales stay finite in fp32."""


@dataclass
class Quantised:
    """One operand of a product."""

    cast: Cast
    along: int
    """The dimension of the source that the product sums over."""

    shape: tuple[int, int]
    """Of the source."""

    codes: Tensor
    """Like the source; padded along the summed dimension to whole rotations where it was rotated. Of the
    format's dtype, uint8 (one code each) for e2m1. A device's casts store them along ``along``."""

    inverse: Tensor
    """fp32: a scalar, one per row [n, 1] or [1, n], or one per block [r, c]."""

    second: Tensor | None = None
    """fp32 scalar that multiplies e4m3 block scales; None for other recipes."""

    _values: Tensor | None = None
    _laid: Tensor | None = None

    @property
    def format(self) -> Format:
        return FORMATS[self.cast.format]

    def values(self, dtype: torch.dtype) -> Tensor:
        """Codes times block scales, exact, for the reference product. Multiply by ``outer`` to get what the
        operand stands for."""
        if self._values is None or self._values.dtype != dtype:
            values = decode(self.codes, self.format, dtype)
            if self.cast.granularity == "block":
                values = _by_blocks(values, self.inverse.to(dtype), _sizes(self.cast, self.along))
            self._values = values
        return self._values

    @property
    def outer(self) -> Tensor | None:
        """The scale that is not in ``values``."""
        return self.second if self.cast.granularity == "block" else self.inverse

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the operand stands for, as the source lay."""
        values = self.values(torch.float32)
        if self.outer is not None:
            values = values * self.outer
        if self.cast.hadamard:
            values = rotated(values, self.along, self.cast.hadamard)
        return values[: self.shape[0], : self.shape[1]].to(dtype)

    def laid(self) -> Tensor:
        """Codes [other dimension, summed dimension], contiguous, as kernels read them. Kept, so that all
        micro-batches of a step share a weight's."""
        if self._laid is None:
            self._laid = device_casts.contiguous(self.codes if self.along == 1 else self.codes.t())
        return self._laid

    def turned(self) -> Quantised:
        """The same codes for a product that sums over the other dimension."""
        turned = Quantised(
            cast=self.cast,
            along=1 - self.along,
            shape=self.shape,
            codes=self.codes,
            inverse=self.inverse,
            second=self.second,
        )
        turned._values = self._values
        return turned

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales as a device would store them: e2m1 two a byte, block scales in theirs."""
        scale = 1 if self.cast.block_scale != "fp32" else 4
        extra = 4 if self.second is not None else 0
        return self.codes.numel() * self.format.bits // 8 + self.inverse.numel() * scale + extra


def amax_of(x: Tensor, cast: Cast, along: int) -> Tensor:
    """Largest magnitudes, fp32, in the shape of the scales. NaN and infinity come through."""
    kernels = device_casts.kernels_for(x)
    if kernels is not None and cast.granularity != "block":
        found: Tensor = kernels.amax(x, _kind(kernels, cast, along))
        return found
    if cast.granularity == "tensor":
        # Two reductions that write nothing are cheaper than one of a tensor of magnitudes.
        low, high = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
        return torch.maximum(-low, high).float()
    if cast.granularity == "row":
        if not x.shape[along]:
            return x.new_zeros([1 if d == along else s for d, s in enumerate(x.shape)], dtype=torch.float32)
        return x.abs().amax(dim=along, keepdim=True).float()
    across, length = _sizes(cast, along)
    padded = _padded(x, across, length)
    blocks = padded.view(padded.shape[0] // across, across, padded.shape[1] // length, length)
    return blocks.abs().amax(dim=(1, 3)).float()


def quantise(
    x: Tensor,
    cast: Cast,
    along: int,
    *,
    amax: Tensor | None = None,
    whole: Tensor | None = None,
    scale: Tensor | None = None,
    margin: int = 0,
    generator: torch.Generator | None = None,
) -> Quantised:
    """``x`` (bf16 or fp32 matrix) cast for a product that sums over its dimension ``along``.

    ``amax`` replaces the tensor's own largest magnitudes, and ``whole`` the largest of all (a group of ranks
    shares them); ``scale`` replaces the scale itself (delayed scaling). ``generator`` draws for stochastic
    rounding. Where a magnitude is NaN or infinite, everything under its scale becomes NaN.
    """
    shape = (x.shape[0], x.shape[1])
    if cast.hadamard:
        x = rotated(x, along, cast.hadamard)
    fmt = FORMATS[cast.format]
    if scale is None and amax is None:
        amax = amax_of(x, cast, along)
    second = None
    if cast.block_scale == "e4m3":
        assert amax is not None
        scale, inverse, second = _two_level(amax, fmt, whole)
    else:
        if scale is None:
            assert amax is not None
            scale = scale_of(amax, fmt, power_of_2=cast.power_of_2, margin=margin)
        inverse = scale.reciprocal()
    kernels = device_casts.kernels_for(x)
    if kernels is not None and fmt.dtype is not None and not cast.stochastic:
        # Blocks' codes stay as the source lies: what reads them views blocks.
        codes = kernels.cast(
            x,
            scale,
            fmt,
            _kind(kernels, cast, along),
            turned=along == 0 and cast.granularity != "block",
            block=_sizes(cast, along) if cast.granularity == "block" else (1, 1),
        )
        return Quantised(cast=cast, along=along, shape=shape, codes=codes, inverse=inverse, second=second)
    scaled = x.float()
    by_blocks = cast.granularity == "block"
    scaled = _by_blocks(scaled, scale, _sizes(cast, along)) if by_blocks else scaled * scale
    if cast.stochastic:
        noise = torch.rand(scaled.shape, generator=generator, device=scaled.device)
        codes = encode(rounded(scaled.clamp_(-fmt.maximum, fmt.maximum), fmt, noise), fmt)
    else:
        codes = encode(scaled, fmt)
    return Quantised(cast=cast, along=along, shape=shape, codes=codes, inverse=inverse, second=second)


def _kind(kernels: Any, cast: Cast, along: int) -> int:
    """Extent of a scale, as ``triton_casts`` names it."""
    by_granularity = {
        "tensor": kernels.WHOLE,
        "row": kernels.ROWS if along == 1 else kernels.COLUMNS,
        "block": kernels.BLOCKS,
    }
    found: int = by_granularity[cast.granularity]
    return found


def scale_of(amax: Tensor, fmt: Format, *, power_of_2: bool = False, margin: int = 0) -> Tensor:
    """fp32 scales that bring ``amax`` to the format's maximum, or below it.

    Rounded once (torchao divides in double precision: the same bits, by an operation that some cards lack);
    powers of two are rounded down. NaN where ``amax`` is not finite.
    """
    divisor = torch.where(torch.isfinite(amax), amax.float(), torch.nan).clamp_min(TINIEST)
    # A number over a tensor would be the tensor's reciprocal times the number, rounded twice.
    scale = torch.full_like(divisor, fmt.maximum) / divisor
    if power_of_2:
        # Of the bits of an fp32 number, sign and exponent are the power of two below it.
        scale = torch.where(scale.isnan(), scale, (scale.view(torch.int32) & 0x7F800000).view(torch.float32))
    return scale * 2.0**-margin if margin else scale


def _two_level(amax: Tensor, fmt: Format, whole: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of blocks for e4m3 block scales: before the cast, after it, and the tensor's own."""
    if whole is None:
        whole = amax.amax() if amax.numel() else amax.new_zeros(())
    whole = torch.where(torch.isfinite(whole), whole, torch.nan).clamp_min(TINIEST)
    second = whole / (fmt.maximum * E4M3.maximum)
    inverse = encode(amax / fmt.maximum / second, E4M3).float()
    # A block whose scale underflows to zero holds zeros.
    scale = torch.where(inverse == 0, 0.0, 1.0 / (inverse * second))
    return scale, inverse, second


def rotated(x: Tensor, along: int, width: int) -> Tensor:
    """``x`` times an orthonormal Hadamard matrix in groups of ``width`` along one dimension, which is
    padded with zeros to whole groups. In a product over that dimension the rotations of both operands
    cancel; twice is the identity."""
    missing = -x.shape[along] % width
    if missing:
        x = torch.nn.functional.pad(x, (0, missing) if along == 1 else (0, 0, 0, missing))
    matrix = _hadamard(width, x.device)
    if along == 1:
        return (x.float().view(x.shape[0], -1, width) @ matrix).view(x.shape).to(x.dtype)
    groups = x.float().view(-1, width, x.shape[1])
    return (matrix @ groups).view(x.shape).to(x.dtype)


def _hadamard(width: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    # Symmetric, and its own inverse.
    return matrix / math.sqrt(width)


def _sizes(cast: Cast, along: int) -> tuple[int, int]:
    """Rows and columns of a block."""
    across, length = cast.block
    return (across, length) if along == 1 else (length, across)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    down, right = -x.shape[0] % rows, -x.shape[1] % columns
    return torch.nn.functional.pad(x, (0, right, 0, down)) if down or right else x


def _by_blocks(x: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """``x`` times its blocks' scales."""
    rows, columns = block
    if x.shape[0] % rows == 0 and x.shape[1] % columns == 0:
        blocks = x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
        return (blocks * scale[:, None, :, None]).view(x.shape)
    spread = scale.repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(columns, 1)[:, : x.shape[1]]
    return x * spread
