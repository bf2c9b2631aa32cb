"""Parameters stay the same parameters when a module moves to a PrivateUse1 device.

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

from ..backends.base import Backend
from ..patching.spec import Patch


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
        )
    ]
