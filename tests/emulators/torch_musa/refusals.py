"""What cards are reported to refuse, refused here as well, so that a test on the emulator finds it.

Reported by users who run Megatron on cards (flagos-ai/Megatron-LM-FL #92, #127, #136, #174, #179): float64
arithmetic is missing, muDNN cannot sort bool, MCCL wants equal sizes, ``torch.jit`` and inductor are off.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

counts: Counter[str] = Counter()
"""How often each kind was refused: also seen where the exception was swallowed."""

_local = threading.local()


class RefusedByCards(RuntimeError):
    """A card is reported to fail here."""


def running(op: str) -> None:
    """The operator that runs on this thread from now on."""
    _local.op = op


def _refuse(kind: str, op: str, found: str, instead: str) -> RefusedByCards:
    counts[kind] += 1
    return RefusedByCards(f"{op} on musa: found {found}, which cards are reported to refuse; {instead}")


def float64(dtype: torch.dtype) -> None:
    """Every float64 tensor of the device."""
    if dtype in (torch.float64, torch.complex128):
        raise _refuse(
            "float64",
            getattr(_local, "op", "an operator"),
            f"a tensor of {dtype}",
            "compute in float32, or move the numbers to the host and use float64 there",
        )


def sorting(op: str, tensors: Iterable[Any]) -> None:
    """``sort``, ``argsort`` and ``topk`` of bool."""
    if op.split("::")[-1].split(".")[0] not in ("sort", "topk", "kthvalue", "msort"):
        return
    if any(isinstance(each, torch.Tensor) and each.dtype is torch.bool for each in tensors):
        raise _refuse("sort of bool", op, "a sort of bool", "sort the same values as int32")


def unequal(op: str, sizes: Iterable[Any]) -> None:
    """A collective of MCCL whose parts differ."""
    sizes = [tuple(each) if isinstance(each, torch.Size) else each for each in sizes]
    if len(set(sizes)) > 1:
        raise _refuse(
            "unequal sizes",
            op,
            f"MCCL given parts of different sizes {sizes}",
            "pad them, or use broadcasts, reduces, sends and receives",
        )


def compiled() -> None:
    """``torch.compile`` by inductor and ``torch.jit.script``, when a tensor of the device comes in."""

    def refusing(name: str, function: Any) -> Any:
        if not callable(function) or isinstance(function, type):
            return function

        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(
                isinstance(x, torch.Tensor) and x.device.type == "musa" for x in (*args, *kwargs.values())
            ):
                raise _refuse("compiled code", name, "code compiled for the device", "run it eagerly")
            return function(*args, **kwargs)

        return call

    compile_, script = torch.compile, torch.jit.script

    @functools.wraps(compile_)
    def compile(model: Any = None, **options: Any) -> Any:
        if options.get("backend", "inductor") != "inductor":
            return compile_(model, **options)
        if model is None:
            return lambda function: compile(function, **options)
        made = compile_(model, **options)
        return made if isinstance(model, torch.nn.Module) else refusing("torch.compile", made)

    @functools.wraps(script)
    def scripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
        made = script(obj, *args, **kwargs)
        plain: Callable[..., Any] | None = obj if type(obj).__name__ == "function" else None
        return made if plain is None else refusing("torch.jit.script", made)

    torch.compile = compile
    torch.jit.script = scripted
