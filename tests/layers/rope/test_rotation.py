"""Rotary positions are multiplications by unit complex numbers, whatever the layout of the pairs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mt_megatron.layers.rope import rotation
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


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[call.__name__.split(".")[0]] += 1
        return call(*args, **(kwargs or {}))


def turned(freqs: Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> list[Tensor]:
    """Queries that are rotated, and a gradient that is rotated back."""
    t = queries(dtype).detach().requires_grad_()
    found = rotate(t, freqs, factor=factor)
    found.backward(queries(dtype) + 1)
    assert t.grad is not None
    return [found.detach(), t.grad]


def test_angles_are_looked_up_once() -> None:
    freqs = angles().float()
    with Operations() as operations:
        first = turned(freqs)
        assert operations.found["sin"] == operations.found["cos"] == 2, "forward and back"
        operations.found.clear()
        again = turned(freqs)
        assert not {"sin", "cos", "neg", "cat", "_to_copy"} & operations.found.keys()
        assert operations.found["roll"] == operations.found["addcmul_"] == 2, "a negative control"
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    anew = turned(freqs.clone())
    assert all(torch.equal(a, b) for a, b in zip(first, anew, strict=True))


def test_what_is_kept_is_that_of_the_angles_dtype_and_factor() -> None:
    freqs = angles().float()
    turned(freqs)
    for change in ({"dtype": torch.bfloat16}, {"factor": 0.5}):
        for found, expected in zip(turned(freqs, **change), turned(freqs.clone(), **change), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found, expected)
    freqs.mul_(2.0)
    for found, expected in zip(turned(freqs), turned(freqs.clone()), strict=True):
        assert torch.equal(found, expected), "angles that were written to"


def test_long_sequences_and_inference_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        freqs = angles().float()
        rotate(queries(torch.float32), freqs)
    assert not vars(freqs)
    long = angles().float()
    monkeypatch.setattr(rotation, "MOST_KEPT", long.numel() - 1)
    turned(long)
    assert not vars(long)
    captured = angles().float()
    monkeypatch.setattr(rotation, "MOST_KEPT", captured.numel())
    monkeypatch.setattr(rotation, "_is_captured", lambda device: True)
    turned(captured)
    assert not vars(captured)
