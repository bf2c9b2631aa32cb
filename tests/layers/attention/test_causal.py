"""Causal attention from batched products equals torch's own, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mt_megatron.layers.attention import core

# b, heads, groups, s, d, d_value: odd lengths, one block, several shares, grouped heads, unequal sizes.
SHAPES = [
    (2, 4, 4, 200, 16, 16),
    (1, 8, 2, 300, 8, 24),
    (2, 3, 1, 64, 32, 32),
    (1, 2, 2, 128, 16, 8),
    (3, 4, 2, 129, 8, 8),
]


def inputs(shape, dtype, seed=0):
    b, heads, groups, s, d, value = shape
    generator = torch.Generator().manual_seed(seed)

    def make(count, size):
        # As the projections leave them: [s, b, heads, d].
        return torch.randn(s, b, count, size, generator=generator).to(dtype).permute(1, 2, 0, 3)

    q, k, v = (t.requires_grad_() for t in (make(heads, d), make(groups, d), make(groups, value)))
    return q, k, v, torch.randn(s, b, heads * value, generator=generator).to(dtype)


def torchs(q, k, v, scale):
    repeats = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    after = torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu_(1)
    weights = (q @ k.mT * scale).masked_fill(after, -torch.inf).softmax(-1)
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


def results(function, q, k, v, grad, scale=0.3):
    output = function(q, k, v, scale)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), grad)]


def summed(q, k, v, grad, scale=0.3):
    """Sums of the magnitudes of all terms of each element of ``results``.

    The rounding of a score, itself a sum, changes its weight by as many times its relative error.
    """
    b, heads, s = q.shape[:3]
    groups = k.size(1)
    q, k, v = (t.detach().repeat_interleave(heads // t.size(1), dim=1) for t in (q, k, v))
    after = torch.ones(s, s, dtype=torch.bool).triu_(1)
    weights = (q @ k.mT * scale).masked_fill(after, -torch.inf).softmax(-1)
    q, k, v = q.abs(), k.abs(), v.abs()
    weights = weights * (1 + q @ k.mT * scale)
    grad = grad.abs().view(s, b, heads, -1).permute(1, 2, 0, 3)
    products = grad @ v.mT
    scores = weights * (products + (weights * products).sum(-1, keepdim=True)) * scale
    of_keys, of_values = (
        t.unflatten(1, (groups, heads // groups)).sum(2) for t in (scores.mT @ q, weights.mT @ grad)
    )
    return [(weights @ v).permute(2, 0, 1, 3).flatten(2), scores @ k, of_keys, of_values]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scores", [1, 1 << 19])
def test_fp32_output_and_gradients_are_the_formulas(shape, scores, monkeypatch):
    monkeypatch.setattr(core, "_SCORES", scores)
    q, k, v, grad = inputs(shape, torch.float32)
    for found, expected, terms in zip(
        results(core.causal_attention, q, k, v, grad),
        results(torchs, q, k, v, grad),
        summed(q, k, v, grad),
        strict=True,
    ):
        torch.testing.assert_close(found / terms, expected / terms, rtol=0, atol=8 * 2**-23)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_bf16_is_no_farther_from_the_formula_than_torchs_kernel(shape):
    q, k, v, grad = inputs(shape, torch.bfloat16)
    exact = results(torchs, *(t.detach().float().requires_grad_() for t in (q, k, v)), grad.float())

    def kernel(q, k, v, scale):
        repeats = q.size(1) // k.size(1)
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        size = max(q.size(-1), v.size(-1))
        padded = [F.pad(t, (0, size - t.size(-1))) for t in (q, k, v)]
        output = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale)
        return output[..., : v.size(-1)].permute(2, 0, 1, 3).flatten(2)

    found = results(core.causal_attention, q, k, v, grad)
    theirs = results(kernel, q, k, v, grad)
    for mine, other, wanted in zip(found, theirs, exact, strict=True):
        error = (mine.float() - wanted).norm() / wanted.norm()
        assert error < 1.5 * (other.float() - wanted).norm() / wanted.norm()
        assert mine.dtype is torch.bfloat16


def test_large_scores_and_a_first_token_that_sees_itself_alone():
    q, k, v, grad = inputs((1, 2, 2, 96, 8, 8), torch.float32)
    q = (q * 1e3).detach().requires_grad_()
    found = results(core.causal_attention, q, k, v, grad)
    assert all(t.isfinite().all() for t in found)
    torch.testing.assert_close(found[0][0].view(2, 8), v[0, :, 0].detach())


def test_it_takes_what_it_can_do_and_nothing_else():
    q, k, v, _ = inputs((1, 2, 2, 64, 8, 8), torch.float32)
    assert core.suits(q, k, v, 0.0)
    assert not core.suits(q, k, v, 0.1)
    assert not core.suits(*(t.double() for t in (q, k, v)), 0.0)
    assert not core.suits(*(t.half() for t in (q, k, v)), 0.0)
    assert not core.suits(*(t[:, :, :32] for t in (q, k, v)), 0.0)
    assert not core.suits(q[:, :, :63], k, v, 0.0)
    assert not core.suits(q.bfloat16(), k, v, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert not core.suits(q, k, v, 0.0)


def test_what_it_keeps_has_no_square_of_the_length():
    q, k, v, _ = inputs((1, 2, 2, 256, 8, 8), torch.float32)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        core.causal_attention(q, k, v, 0.3)
    assert max(sizes) == 256 * 2 * 8
