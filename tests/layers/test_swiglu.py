"""SwiGLU against its definition, and against upstream's as patched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mt_megatron.layers.swiglu import bias_swiglu

WIDTH = 10


def definition(x, bias):
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return F.silu(gate) * up


def make(dtype=torch.float32, with_bias=True):
    generator = torch.Generator().manual_seed(0)
    x, bias, dy = (
        torch.randn(s, generator=generator) for s in ((6, 3, 2 * WIDTH), (2 * WIDTH,), (6, 3, WIDTH))
    )
    bias = bias.to(dtype).requires_grad_() if with_bias else None
    return x.to(dtype).requires_grad_(), bias, dy.to(dtype)


def gradients(function, x, bias, dy):
    inputs = [t for t in (x, bias) if t is not None]
    output = function(x, bias)
    return [output.detach(), *torch.autograd.grad(output, inputs, dy.to(output.dtype))]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_output_and_gradients(dtype, tolerance, with_bias):
    x, bias, dy = make(dtype, with_bias)
    found = gradients(bias_swiglu, x, bias, dy)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, bias)]
    for mine, theirs in zip(found, gradients(definition, *wide, dy.double()), strict=True):
        assert mine.dtype is dtype and mine.shape == theirs.shape
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=5 * tolerance)


def test_gradcheck():
    x, bias, _ = make(torch.float64)
    assert torch.autograd.gradcheck(bias_swiglu, (x, bias))


def test_two_dimensional_and_strided_input():
    x, bias, _ = make()
    torch.testing.assert_close(bias_swiglu(x[0], bias), definition(x[0], bias))
    torch.testing.assert_close(bias_swiglu(x.transpose(0, 1), bias), definition(x.transpose(0, 1), bias))
    bias_swiglu(x.transpose(0, 1), bias).sum().backward()
    expected = torch.autograd.grad(definition(x, bias).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(("store", "kept"), [(False, torch.bfloat16), (True, torch.float8_e4m3fn)])
def test_only_the_input_is_kept(store, kept):
    x, _, dy = make(torch.bfloat16, with_bias=False)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append((t.dtype, t.shape)) or t, lambda t: t
    ):
        output = bias_swiglu(x, None, store)
    assert seen == [(kept, x.shape)]
    output.backward(dy)
    expected = torch.autograd.grad(definition(x.float(), None), x, dy.float())[0]
    error = (x.grad - expected).float().norm() / expected.float().norm()
    assert error < (0.05 if store else 0.01)


def against_upstream() -> list[Any]:
    import mt_megatron

    mt_megatron.patch("cpu", features=["device"])
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer import mlp

    x, bias, dy = make()
    patched = gradients(mlp.bias_swiglu_impl, x, bias, dy)

    def theirs(x: Any, bias: Any) -> Any:
        flat = fused_bias_swiglu.BiasSwiGLUFunction.apply(x.view(-1, x.shape[-1]), bias, False)
        return flat.view(*x.shape[:-1], -1)

    upstream = gradients(theirs, x, bias, dy)
    return [
        mlp.bias_swiglu_impl.__name__,
        max(float((a - b).abs().max()) for a, b in zip(patched, upstream, strict=True)),
    ]


def test_patched_into_the_mlp_it_agrees_with_upstreams():
    from tests.launch import run_ranks

    ((name, difference),) = run_ranks(1, "tests.layers.test_swiglu:against_upstream")
    assert name == "bias_swiglu_impl" and difference < 1e-5
