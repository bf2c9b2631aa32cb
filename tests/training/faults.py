"""Faults put into a run: values that are not finite, at a module, a pass, a step and a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_megatron.seams import events
from mt_megatron.training import loop


class _BadGradient(torch.autograd.Function):
    """The identity, whose gradient holds one bad value while ``active()``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, active: Callable[[], bool], value: float) -> Tensor:
        ctx.active, ctx.value = active, value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].clone()
        if ctx.active():
            gradient.view(-1)[0] = ctx.value
        return gradient, None, None


@contextmanager
def injected(fault: dict[str, Any] | None) -> Iterator[None]:
    """Runs of ``mt_megatron.training.loop`` within have ``fault``:

    ``module`` (path within the chunk), ``kind`` (``forward``, ``backward``, ``weight``, ``loss``),
    ``value`` (a number that JSON has no word for, as text), ``steps``, ``rank``; ``once`` for one that
    does not come back when a step is repeated.
    """
    if fault is None:
        yield
        return
    now = {"step": 0, "left": 1 if fault.get("once") else 1_000_000}
    rank = dist.get_rank() if dist.is_initialized() else 0

    def active() -> bool:
        if rank != fault["rank"] or now["step"] not in fault["steps"] or now["left"] < 1:
            return False
        now["left"] -= 1
        return True

    original_build = loop.build

    def build(*args: Any) -> Any:
        trainable = original_build(*args)
        if rank == fault["rank"]:
            _install(trainable, fault, active)
        return trainable

    def listener(phase: str, name: str, attrs: Any) -> None:
        if (phase, name) == ("begin", "step"):
            now["step"] = attrs["iteration"]

    stop_listening = events.subscribe(listener)
    loop.build = build
    try:
        yield
    finally:
        loop.build = original_build
        stop_listening()


def _install(trainable: Any, fault: dict[str, Any], active: Callable[[], bool]) -> None:
    value, chunk = float(fault["value"]), trainable.bare_chunks()[0]
    module = chunk.get_submodule(fault["module"])
    forward = module.forward

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        if fault["kind"] == "backward":
            return forward(_BadGradient.apply(args[0], active, value), *args[1:], **kwargs)
        if fault["kind"] == "weight":
            if active():
                with torch.no_grad():
                    module.weight.view(-1)[0] = value
            return forward(*args, **kwargs)
        output = forward(*args, **kwargs)
        if active():
            first = output[0] if isinstance(output, tuple) else output
            changed = first.clone()
            changed.view(-1)[0] = value
            return (changed, *output[1:]) if isinstance(output, tuple) else changed
        return output

    module.forward = spoilt
