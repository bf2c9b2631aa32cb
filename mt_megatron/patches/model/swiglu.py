"""SwiGLU where it is not compiled: a third of the passes over memory that upstream's eager form makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def _bias_swiglu_impl(backend: Backend) -> Callable[..., Any]:
    vendor = backend.fused("swiglu")

    def bias_swiglu_impl(input: Any, bias: Any, fp8_input_store: bool = False) -> Any:
        if vendor is not None and not fp8_input_store:
            return vendor(input if bias is None else input + bias)
        return _bias_swiglu()(input, bias, fp8_input_store)

    return bias_swiglu_impl


@cache
def _bias_swiglu() -> Callable[..., Any]:
    """Imported late, once: a statement in the function itself would cost each call some microseconds."""
    from mt_megatron.layers.swiglu import bias_swiglu

    return bias_swiglu


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="swiglu.bias_swiglu_impl",
            target="megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl",
            kind="replace",
            feature="device",
            backends=frozenset({"cpu", "musa"}),
            reason="upstream's backward is written for a compiler: run eagerly it makes ten temporaries",
            body=_bias_swiglu_impl(backend),
            digest="265c41ffa15a675841e81192e1acce9a767b5701e96b151efa175de138e85f45",
        )
    ]
