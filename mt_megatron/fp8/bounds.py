"""The error of a quantised product that a recipe promises, element by element.

Operands that are rounded to the nearest value have a worst case: half a step for each element, and all of
them in the same direction. Draws have one too, a whole step each, which no sum of independent draws comes
near; what holds for a sum of draws is a concentration bound that each element of the product passes with
a probability of at most ``FAILURE``. Sources: W. Hoeffding, "Probability inequalities for sums of bounded
random variables" (1963); M. Kearns and L. Saul, "Large deviation methods for approximate probabilistic
inference" (UAI 1998), whose variance proxy of a Bernoulli variable is at most Hoeffding's 1/4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_megatron.fp8.quantise import Quantised, _by_blocks, _sizes
from mt_megatron.fp8.recipe import CONTRACTED, Role

FAILURE = 1e-9
"""Probability with which one element of a product with drawn operands may pass its bound."""

_MISPLACED = 2.0**-20
"""How far fp32 arithmetic before the cast, in 24 bits, may move an element within its step."""


@dataclass(frozen=True)
class OperandError:
    """The difference between an operand and what was decoded, element by element, float64."""

    largest: Tensor
    """The worst case."""

    sure: Tensor
    """The part of ``largest`` that is there whatever is drawn."""

    variance: Tensor | None
    """Variance proxy v of the drawn part e: E exp(t e) <= exp(t^2 v / 2) for every t, the mean of e being 0.
    None where nothing is drawn."""


def operand_error(x: Tensor, quantised: Quantised) -> OperandError:
    """The errors of the decoded elements of ``x``, [rows, columns].

    Half the step between the format's values around it times its scale, a whole one where rounding is
    stochastic; beyond the range, how far beyond it is; in a block whose e4m3 scale is zero, the element
    itself. For rotated operands ``x`` and the errors are of the rotated elements.

    A draw leads up with probability p, the place of the element in its step, and down otherwise; its
    variance proxy is (1 - 2p) / (2 log((1 - p) / p)) steps squared.
    """
    fmt, cast = quantised.format, quantised.cast
    one = torch.ones(quantised.codes.shape, dtype=torch.float64)
    if cast.granularity == "block":
        inverse = _by_blocks(one, quantised.inverse.double(), _sizes(cast, quantised.along))
        if quantised.second is not None:
            inverse = inverse * quantised.second.double()
    else:
        inverse = one * quantised.inverse.double()
    magnitude = x.double().abs()
    # The multiplication by the scale is rounded to fp32 first, which may lead to the next step.
    scaled = magnitude / inverse.clamp_min(1e-300) * (1 + 2.0**-22)
    exponent = (torch.frexp(scaled).exponent - 1).clamp(fmt.min_exponent, fmt.max_exponent)
    step = torch.ldexp(one, exponent - fmt.mantissa_bits)
    beyond = scaled - fmt.maximum
    arithmetic = 2.0**-22 * magnitude

    def bound(error: Tensor) -> Tensor:
        return torch.where(inverse == 0, magnitude, torch.maximum(error, beyond) * inverse + arithmetic)

    if not cast.stochastic:
        largest = bound(step / 2)
        return OperandError(largest=largest, sure=largest, variance=None)
    place = scaled / step
    place = place - place.floor()
    # Nearer to the middle of the step, where the proxy is largest. A zero stays a zero.
    place = torch.where(place < 0.5, (place + _MISPLACED).clamp_max(0.5), (place - _MISPLACED).clamp_min(0.5))
    proxy = torch.where(
        place == 0.5, 0.25, (1 - 2 * place) / (2 * torch.log((1 - place) / place)).nan_to_num(1.0)
    )
    drawn = (magnitude > 0) & (beyond < 0) & (inverse > 0)
    return OperandError(
        largest=bound(step),
        # Of 24 bits, draws lead up too seldom by less than 2^-24 of a step.
        sure=bound(2.0**-23 * step),
        variance=torch.where(drawn, proxy * (step * inverse).square(), 0.0),
    )


def product_bound(role: Role, a: Tensor, b: Tensor, qa: Quantised, qb: Quantised, output: Tensor) -> Tensor:
    """How far each element of the product may be from the float64 product of ``a`` and ``b``: errors of the
    operands, fp32 accumulation, and two roundings of the result to the output's dtype.

    Without draws it holds always. With draws, each element passes it with a probability of at most
    ``FAILURE``: a sum of independent errors with variance proxies v_k and factors w_k is beyond
    sqrt(2 log(2 / FAILURE) sum(w_k^2 v_k)) that seldom (half of ``FAILURE`` for each operand if both are
    drawn). Where the worst case is smaller, as in short sums, it is taken.
    """
    ea, eb = operand_error(a, qa), operand_error(b, qb)
    a, b = a.double().abs(), b.double().abs()
    along_a, along_b = CONTRACTED[role]

    def times(left: Tensor, right: Tensor) -> Tensor:
        left = left if along_a == 1 else left.t()
        right = right.t() if along_b == 1 else right
        return left @ right

    # (a + ea)(b + eb) - ab = a eb + ea (b + eb): for given draws of b the last factor is a constant.
    decoded = b + eb.largest
    operands = times(a, eb.largest) + times(ea.largest, decoded)
    drawn = [each for each in (ea.variance, eb.variance) if each is not None]
    if drawn:
        factor = math.sqrt(2 * math.log(2 * len(drawn) / FAILURE))
        likely = times(a, eb.sure) + times(ea.sure, decoded)
        if ea.variance is not None:
            likely += factor * times(ea.variance, decoded.square()).sqrt()
        if eb.variance is not None:
            likely += factor * times(a.square(), eb.variance).sqrt()
        operands = torch.minimum(operands, likely)
    length = a.shape[along_a]
    unit = torch.finfo(output.dtype).eps
    accumulation = length * 2.0**-23 * times(a + ea.largest, decoded)
    return operands + accumulation + 2 * unit * output.double().abs()
