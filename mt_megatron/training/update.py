"""The parts of one optimizer update, apart, so that all ranks can agree before the weights change.

Megatron-Core's own ``optimizer.step()`` does them in one go and leaves no moment between the gradient
norm and the update. The parts are its own functions in its own order, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def prepare(optimizer: Any) -> bool:
    """Bring the reduced gradients to the optimizer and unscale them (fp16, which also moves the loss
    scale). Returns whether they overflowed; collective over the model-parallel group in fp16."""
    return bool(optimizer.prepare_grads())


def gradient_norm(optimizer: Any) -> float:
    """The norm of all gradients, before clipping; collective over the model-parallel group."""
    norms = [float(part.get_grad_norm() or 0.0) for part in _parts(optimizer)]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))


def clip_and_apply(optimizer: Any, norm: float | None) -> None:
    """Scale the gradients down to ``clip_grad`` where it is set, and change the weights."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    if norm is not None:
        for part in _parts(optimizer):
            if part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(
                    part.get_parameters(), max_norm=part.config.clip_grad, total_norm=norm
                )
    optimizer.step_with_ready_grads()


def wants_norm(optimizer: Any) -> bool:
    """Whether clipping needs the norm."""
    return any(part.config.clip_grad > 0 for part in _parts(optimizer))


def loss_scale_is_stuck(optimizer: Any) -> bool:
    """Whether the loss scale cannot get smaller: it is constant, or at its minimum. Waits for the device."""
    scaler = getattr(_parts(optimizer)[0], "grad_scaler", None)
    minimum = getattr(scaler, "min_scale", None)
    return minimum is None or float(optimizer.get_loss_scale()) <= float(minimum)


def loss_scales(optimizer: Any) -> Callable[[], None]:
    """Remembers the loss scale and its counters; what is returned brings them back."""
    scalers = [
        part.grad_scaler for part in _parts(optimizer) if getattr(part, "grad_scaler", None) is not None
    ]
    # An update makes a new scale rather than change the tensor.
    states = [(scaler, dict(scaler.state_dict())) for scaler in scalers]

    def restore() -> None:
        for scaler, state in states:
            scaler.load_state_dict(state)

    return restore


def _parts(optimizer: Any) -> list[Any]:
    parts: list[Any] = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return parts
