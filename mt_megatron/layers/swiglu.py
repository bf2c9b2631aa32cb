"""SwiGLU without a compiler: only the input is saved, with one temporary in each direction."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def bias_swiglu(input: Tensor, bias: Tensor | None, fp8_input_store: bool = False) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = (input + bias).chunk(2, -1)``; (..., 2 f) -> (..., f).

    ``fp8_input_store`` keeps the input for backward in float8_e4m3fn, without a scale, as upstream
    does: values beyond 448 saturate.
    """
    output: Tensor = _SwiGLU.apply(input, bias, fp8_input_store)  # type: ignore[no-untyped-call]
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, fp8_input_store: bool) -> Tensor:
        ctx.save_for_backward(input.to(torch.float8_e4m3fn) if fp8_input_store else input, bias)
        ctx.dtype = input.dtype
        gate, up = (input if bias is None else input + bias).chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, bias = ctx.saved_tensors
        input = input.to(ctx.dtype)
        if bias is not None:
            input = input + bias
        gate, up = input.chunk(2, -1)
        grad = torch.empty_like(input, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.mul(grad_output, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        torch.mul(F.silu(gate), grad_output, out=grad_up)
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[1]:
            # Experts' linears give each row its own.
            grad_bias = grad if bias.shape == grad.shape else grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad, grad_bias, None
