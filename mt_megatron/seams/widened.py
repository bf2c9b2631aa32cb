"""bf16 products by fp32 kernels, on processors for which torch has no bf16 kernels.

On x86 without AVX-512 torch multiplies bf16 matrices in plain loops, several times slower than fp32's
kernels. Here both operands are widened to fp32, which is exact; sums are fp32 and the result is rounded to
bf16 once, as by torch's loops and by bf16 hardware. The order of the sums is another: of large products about
one element in 10,000 rounds to its other neighbour. Processor and shape decide, no race does, so that the
same machine gives the same bits.

The FP8 reference always computes so on such a processor. Other products do where a run asks for it
(``cpu_bf16_products``), since without it they are upstream's to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint

CHOICES = ("torch", "fp32")
"""Values of ``cpu_bf16_products``."""

_LEAST_PRODUCTS = 1 << 17
"""Multiplications of the smallest product that pays for two casts and their memory."""

_everywhere = False


@cache
def serves_processor() -> bool:
    """Whether torch has no bf16 kernels for this processor: oneDNN refuses it. False where none can say."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is not None and torch.backends.mkldnn.is_available() and not asked()


def choose(products: str) -> None:
    """What computes the bf16 products of this process on a CPU: ``torch``, or ``fp32`` where that serves the
    processor. Raises ConfigError for another word."""
    global _everywhere
    if products not in CHOICES:
        raise ConfigError(
            f"found cpu_bf16_products {products!r}; expected one of {', '.join(CHOICES)}."
            f"{hint(products, CHOICES)} Change --cpu-bf16-products."
        )
    _everywhere = products == "fp32"


@contextmanager
def chosen(products: str) -> Iterator[None]:
    """``choose`` for what runs within."""
    before = "fp32" if _everywhere else "torch"
    choose(products)
    try:
        yield
    finally:
        choose(before)


def note(products: str, device_type: str) -> str | None:
    """A line about ``products`` where a run computes on ``device_type``; None for torch's own."""
    if products == "torch":
        return None
    if device_type != "cpu":
        return f"cpu_bf16_products {products} changes nothing on a {device_type} device"
    if serves_processor():
        return (
            "bf16 products by fp32 kernels, rounded once: torch has none for bf16 on this processor "
            f"({torch.backends.cpu.get_cpu_capability()})"
        )
    return f"cpu_bf16_products {products} changes nothing here: torch has bf16 kernels for this processor"


def everywhere() -> bool:
    """Whether all bf16 products that suit come here, and not the FP8 reference's alone."""
    return _everywhere


def suits(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` [.., m, k] times ``b`` [.., k, n] is faster here: bf16 on such a processor, and large."""
    if a.dtype is not torch.bfloat16 or b.dtype is not torch.bfloat16 or a.device.type != "cpu":
        return False
    return a.numel() * b.shape[-1] >= _LEAST_PRODUCTS and serves_processor()


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """``a`` [m, k] times ``b`` [k, n] in bf16, written or with ``accumulate`` added to ``out`` [m, n] of any
    floating dtype; outside autograd. Temporaries: both operands and the result in fp32."""
    a, b = a.float(), b.float()
    if out is not None and accumulate and out.dtype is torch.bfloat16:
        # The sum with what ``out`` holds is rounded, and not the product before it: as by ``addmm_``.
        return out.copy_(torch.addmm(out.float(), a, b))
    result = torch.mm(a, b).bfloat16()
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """``torch.bmm``, by fp32 kernels where that is asked for and suits; outside autograd."""
    if _everywhere and suits(a, b):
        return torch.bmm(a.float(), b.float()).bfloat16()
    return torch.bmm(a, b)
