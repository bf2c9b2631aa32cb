"""The error of a quantised product that a recipe promises, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_megatron.fp8.quantise import Quantised, _by_blocks
from mt_megatron.fp8.recipe import CONTRACTED, Role


def operand_bound(x: Tensor, quantised: Quantised) -> Tensor:
    """How far each decoded element may be from ``x``, float64.

    Half the step between the format's values around it times its scale, a whole one where rounding is
    stochastic; beyond the range, how far beyond it is; in a block whose e4m3 scale is zero, the element
    itself. For rotated operands ``x`` and the bound are of the rotated elements.
    """
    fmt, cast = quantised.format, quantised.cast
    one = torch.ones(quantised.codes.shape, dtype=torch.float64)
    if cast.granularity == "block":
        inverse = _by_blocks(one, quantised.inverse.double(), cast, quantised.along)
        if quantised.second is not None:
            inverse = inverse * quantised.second.double()
    else:
        inverse = one * quantised.inverse.double()
    magnitude = x.double().abs()
    # The multiplication by the scale is rounded to fp32 first, which may lead to the next step.
    scaled = magnitude / inverse.clamp_min(1e-300) * (1 + 2.0**-22)
    exponent = (torch.frexp(scaled).exponent - 1).clamp(fmt.min_exponent, fmt.max_exponent)
    step = torch.ldexp(one, exponent - fmt.mantissa_bits)
    error = step if cast.stochastic else step / 2
    error = torch.maximum(error, scaled - fmt.maximum)
    bound = error * inverse + 2.0**-22 * magnitude
    return torch.where(inverse == 0, magnitude, bound)


def product_bound(role: Role, a: Tensor, b: Tensor, qa: Quantised, qb: Quantised, output: Tensor) -> Tensor:
    """How far each element of the product may be from the float64 product of ``a`` and ``b``: errors of the
    operands, fp32 accumulation, and two roundings of the result to the output's dtype."""
    da, db = operand_bound(a, qa), operand_bound(b, qb)
    a, b = a.double().abs(), b.double().abs()
    along_a, along_b = CONTRACTED[role]

    def times(left: Tensor, right: Tensor) -> Tensor:
        left = left if along_a == 1 else left.t()
        right = right.t() if along_b == 1 else right
        return left @ right

    whole = times(a + da, b + db)
    length = a.shape[along_a]
    unit = torch.finfo(output.dtype).eps
    return (
        times(a, db)
        + times(da, b)
        + times(da, db)
        + length * 2.0**-23 * whole
        + 2 * unit * output.double().abs()
    )
