"""Parameters stay the same parameters when they move to a PrivateUse1 device.

``Module.to`` changes a parameter in place between cpu and cuda. To a vendor's PrivateUse1 device torch
has to make new Parameter objects, and so drops what Megatron wrote on the old ones
(``sequence_parallel``, ``tensor_model_parallel``, ``shared`` ...: gradients of norms would no longer be
summed, without a word) and unties weights that two modules share.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


class _Move(threading.local):
    """The outermost call in progress of this thread."""

    depth = 0

    def __init__(self) -> None:
        self.replaced: dict[int, tuple[Any, Any]] = {}


def _apply(original: Callable[..., Any], *, device_type: str) -> Callable[..., Any]:
    move = _Move()

    @functools.wraps(original)
    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(self._parameters)
        move.depth += 1
        try:
            result = original(self, *args, **kwargs)
            for name, old in before.items():
                new = self._parameters[name]
                if old is None or new is old or new.device.type != device_type:
                    continue
                # The old one is kept to the end, so that its id stays its own.
                _, first = move.replaced.setdefault(id(old), (old, new))
                if first is new:
                    new.__dict__.update(old.__dict__)
                self._parameters[name] = first
        finally:
            move.depth -= 1
            if not move.depth:
                move.replaced.clear()
        return result

    return _apply


def _gating(original: Callable[..., Any], self: Any, input: Any, *, device_type: str) -> Any:
    """Upstream moves a router's weight at its first use, through ``.data``, which torch allows between
    cpu and cuda only. Swapping contents keeps the parameter that an optimizer may already hold."""
    import torch

    weight = self.weight
    if weight.device.type == "cpu" and input.device.type == device_type:
        moved = torch.nn.Parameter(weight.detach().to(input.device), weight.requires_grad)
        moved.__dict__.update(weight.__dict__)
        torch.utils.swap_tensors(weight, moved)
    return original(self, input)


def patches(backend: Backend) -> list[Patch]:
    """Nothing for cpu and cuda, between which torch moves parameters in place."""
    if backend.device_type in ("cpu", "cuda"):
        return []
    return [
        Patch(
            id="moved_parameters.module_apply",
            target="torch.nn.modules.module:Module._apply",
            kind="value",
            feature="device",
            reason="moving to a PrivateUse1 device makes new parameters and drops Megatron's marks on them",
            body=functools.partial(_apply, device_type=backend.device_type),
        ),
        Patch(
            id="moved_parameters.router",
            target="megatron.core.transformer.moe.router:Router.gating",
            kind="wrap",
            feature="device",
            reason="it moves the weight to the device through .data, which torch refuses for PrivateUse1",
            body=functools.partial(_gating, device_type=backend.device_type),
            digest="43c14e668d67a17e36b6160ead66d304a1bf343bf2a2a6c7415bcac54d1a7a7c",
        ),
    ]
