"""Rotary positions are multiplications by unit complex numbers, whatever the layout of the pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mt_megatron.layers.rope.rotation import rotate

S, B, N, D = 12, 2, 3, 8


def angles(size: int = D, *, interleaved: bool = False) -> Tensor:
    half = torch.outer(torch.arange(S), 1.0 / 100 ** (torch.arange(size // 2) / size)).double()
    both = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)
    return both[:, None, None, :]


def by_complex_numbers(t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    size = freqs.shape[-1]
    head, rest = t[..., :size].double(), t[..., size:].double()
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else torch.stack(head.chunk(2, -1), -1)
    angle = freqs[..., ::2] if interleaved else freqs[..., : size // 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle))
    found = turned.flatten(-2) if interleaved else torch.cat((turned[..., 0], turned[..., 1]), -1)
    return torch.cat((found, rest), -1)


def queries(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(3)
    # As in attention: a part of a wider projection, not contiguous.
    return torch.randn(S, B, N, 3 * D).to(dtype)[..., D : 2 * D]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [D, D // 2])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_it_is_a_complex_product(interleaved: bool, size: int, dtype: torch.dtype, bound: float) -> None:
    t, freqs = queries(dtype), angles(size, interleaved=interleaved)
    found = rotate(t, freqs.to(torch.float32) if dtype is not torch.float64 else freqs, interleaved)
    expected = by_complex_numbers(t, freqs, interleaved)
    assert found.dtype is dtype and found.shape == t.shape
    assert (found.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_other_layout_of_pairs_is_another_rotation(interleaved: bool) -> None:
    t, freqs = queries(), angles(interleaved=interleaved)
    expected = by_complex_numbers(t, freqs, interleaved)
    assert (rotate(t, freqs, not interleaved) - expected).abs().max() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [D, D // 2])
def test_gradients_are_those_of_finite_differences(interleaved: bool, size: int) -> None:
    freqs = angles(size, interleaved=interleaved)
    t = queries().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, freqs, interleaved), (t,))


def test_halves_may_turn_by_different_angles() -> None:
    freqs = torch.randn(S, 1, 1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(lambda x: rotate(x, freqs), (queries().requires_grad_(),))
    t = queries()
    first, second = t.chunk(2, -1)
    expected = t * freqs.cos() + torch.cat((-second, first), -1) * freqs.sin()
    torch.testing.assert_close(rotate(t, freqs), expected)
