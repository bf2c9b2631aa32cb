"""Pointwise fusions run eagerly where compiling them costs more than they save."""

from __future__ import annotations

from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

# Functions that 0.9.0 decorates with jit_fuser. Where their module is already imported the
# decorator has run, and the compiled wrapper has to give way to the function inside it.
_FUSED = {
    "megatron.core.transformer.utils": ("gelu_impl", "erf_gelu"),
    "megatron.core.fusions.fused_bias_gelu": ("bias_gelu", "bias_gelu_back"),
    "megatron.core.fusions.fused_bias_swiglu": ("swiglu", "bias_swiglu", "swiglu_back", "bias_swiglu_back"),
    "megatron.core.fusions.fused_bias_geglu": ("geglu", "bias_geglu", "geglu_back", "bias_geglu_back"),
    "megatron.core.fusions.fused_cross_entropy": (
        "calculate_logits_max",
        "calculate_predicted_logits",
        "calculate_cross_entropy_loss",
        "calculate_gradients",
    ),
    "megatron.core.fusions.fused_bias_dropout": (
        "bias_dropout_add_fused_train",
        "bias_dropout_add_fused_inference",
    ),
}


_WHERE = frozenset({"cpu", "musa"})


def _run_eagerly(function: Any) -> Any:
    return function


def _inside(compiled: Any) -> Any:
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)


def patches(backend: Backend) -> list[Patch]:
    """On cpu, where compiling one SwiGLU takes about 20 s and needs a C++ compiler, and on musa, where it
    needs the vendor's Triton, which is no part of torch_musa."""
    found = [
        Patch(
            id="eager.jit_fuser",
            target="megatron.core.jit:jit_fuser",
            kind="value",
            feature="device",
            backends=_WHERE,
            reason="torch.compile takes 20 s for a SwiGLU on cpu, and needs a Triton of its own on musa",
            body=lambda original: _run_eagerly,
        )
    ]
    for module, functions in _FUSED.items():
        found += [
            Patch(
                id=f"eager.{function}",
                target=f"{module}:{function}",
                kind="value",
                feature="device",
                backends=_WHERE,
                reason="already decorated with jit_fuser when its module was imported first",
                body=_inside,
            )
            for function in functions
        ]
    return found
