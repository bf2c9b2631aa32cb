"""Hugging Face's modules computed in fp64 throughout, so that what they give can be compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Widened(TorchFunctionMode):
    """Whatever asks for fp32 by name gets fp64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_fp64() -> Iterator[None]:
    """A module that ``double()`` was called on still rounds to fp32 within: norms, rotary angles, softmax and
    routers ask for that dtype by name, and masks are made in the default one. In here they do not."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)
