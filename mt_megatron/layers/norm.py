"""RMSNorm and LayerNorm for Megatron's layer specs, without Apex and Transformer Engine.

Both compute their statistics in fp32, mark their parameters for the gradient sum that sequence
parallelism needs, and name them as Apex and Transformer Engine do (``weight``, ``bias``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ConfigError


class _Norm(torch.nn.Module):
    """What both have in common: the parameters and their dtype rule.

    ``config`` is a TransformerConfig; read are ``layernorm_zero_centered_gamma``, ``params_dtype``
    and ``sequence_parallel``. The output has the input's dtype, or the parameters' where that is
    narrower (an fp32 residual stream entering bf16 linears).
    """

    bias: Tensor | None

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, *, with_bias: bool) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered_gamma = bool(config.layernorm_zero_centered_gamma)
        self.sequence_parallel = bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        if with_bias:
            self.bias = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        else:
            self.register_parameter("bias", None)
        for parameter in self.parameters():
            # Each rank sees its share of the tokens: finalize_model_grads sums these gradients.
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Identity: a gain of one (zero when zero-centred), no bias."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension (arXiv:1910.07467)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **hints: Any) -> None:
        _refuse_unknown(hints)
        super().__init__(config, hidden_size, eps, with_bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return rms_norm(input, self.weight, self.eps, zero_centered=self.zero_centered_gamma)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension (arXiv:1607.06450)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **hints: Any) -> None:
        _refuse_unknown(hints)
        super().__init__(config, hidden_size, eps, with_bias=True)

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps, zero_centered=self.zero_centered_gamma)


def rms_norm(input: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """``RMSNorm`` of [..., hidden]. ``weight`` [hidden] is the gain, or it less one (``zero_centered``)."""
    gain, dtype = _gain(weight, zero_centered), _output_dtype(weight, input)
    if input.device.type != "cpu" and gain.dtype == input.dtype == dtype:
        return F.rms_norm(input, weight.shape, gain, eps)
    output: Tensor = _RMSNorm.apply(input, gain, eps, dtype)  # type: ignore[no-untyped-call]
    return output


def layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool
) -> Tensor:
    """``LayerNorm`` of [..., hidden] with ``weight`` and ``bias`` [hidden]."""
    gain, dtype = _gain(weight, zero_centered), _output_dtype(weight, input)
    if bias is not None and bias.dtype != gain.dtype:
        bias = bias.to(gain.dtype)
    if gain.dtype != input.dtype and not (gain.dtype is torch.float32 and input.device.type == "cpu"):
        # The CPU kernel mixes low-precision input with fp32 parameters; elsewhere widen first.
        input, gain = input.float(), gain.float()
        bias = None if bias is None else bias.float()
    return F.layer_norm(input, weight.shape, gain, bias, eps).to(dtype)


def normalised(
    normalization: str, input: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, zero_centered: bool
) -> Tensor:
    """The norm that ``normalization`` names, with parameters that lie elsewhere."""
    if normalization == "RMSNorm":
        return rms_norm(input, weight, eps, zero_centered=zero_centered)
    return layer_norm(input, weight, bias, eps, zero_centered=zero_centered)


def _gain(weight: Tensor, zero_centered: bool) -> Tensor:
    # One is added in fp32: bf16 would lose most of a small gain.
    return weight.float() + 1.0 if zero_centered else weight


def _output_dtype(weight: Tensor, input: Tensor) -> torch.dtype:
    return weight.dtype if weight.itemsize < input.itemsize else input.dtype


def norm_class(config: Any) -> type[RMSNorm] | type[LayerNorm]:
    """The class that ``config.normalization`` names. Raises ConfigError for an unknown name."""
    known = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    try:
        return known[config.normalization]  # type: ignore[return-value]
    except KeyError:
        raise ConfigError(
            f"normalization is {config.normalization!r}; expected one of {', '.join(known)}"
        ) from None


def _refuse_unknown(hints: dict[str, Any]) -> None:
    # Specs pass these to every implementation. They repeat what the config says or choose a kernel.
    unknown = hints.keys() - {"persist_layer_norm", "zero_centered_gamma", "normalization"}
    if unknown:
        raise TypeError(f"unexpected argument(s) {', '.join(sorted(unknown))}")


class _RMSNorm(torch.autograd.Function):
    """Keeps the input and one number per token, where torch's composite keeps fp32 copies."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        norm = torch.linalg.vector_norm(
            input, dim=-1, keepdim=True, dtype=torch.promote_types(input.dtype, torch.float32)
        )
        scale = norm.square_().div_(input.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(input, gain, scale)
        output: Tensor = (input * scale).mul_(gain).to(dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, gain, scale = ctx.saved_tensors
        wide = scale.dtype
        hidden = input.shape[-1]
        flat, scale = input.reshape(-1, hidden), scale.reshape(-1)
        grad = grad_output.reshape(-1, hidden).to(wide)
        product = grad * flat
        grad_gain = torch.mv(product.t(), scale).to(gain.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_gain, None, None
        # d/dx of x * scale * gain, where scale depends on every x of the token.
        through_scale = torch.mv(product, gain.to(wide)).mul_(scale.pow(3)).div_(-hidden)
        grad_input = torch.mul(grad, gain, out=product).mul_(scale[:, None])
        grad_input = grad_input.addcmul_(flat.to(wide), through_scale[:, None])
        return grad_input.to(input.dtype).view_as(input), grad_gain, None, None
