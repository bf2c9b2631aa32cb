"""Hooks that take every module's output and the gradient that arrives at it, micro-batch by micro-batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .pieces import Piece
from .place import Frame, Kind, Place, kind_of, place, sequence_first

_LAYER = re.compile(r"^decoder\.layers\.(\d+)")
# Containers whose output is that of their last module; attention's and experts' inner tensors have shapes
# that belong to an implementation.
_LEFT_OUT = re.compile(r"^(decoder|decoder\.layers)$|\.core_attention\.|\.experts\b")


# What a layer spec leaves empty hands its input on; another spec may have a norm of that name there.
_EMPTY = ("ModuleList", "IdentityOp", "IdentityFuncOp")


class Recorder:
    """Collects the pieces of one step on this rank."""

    def __init__(self, *, frame: Callable[[int], Frame], gradient_scale: float, gated: bool) -> None:
        """``frame(k)`` is where micro-batch ``k`` lies; gradients are multiplied by ``gradient_scale``."""
        self.pieces: list[Piece] = []
        self.not_placed: dict[str, None] = {}
        self._frame = frame
        self._scale = gradient_scale
        self._gated = gated
        self._current: int | None = None
        self._recomputed: Counter[str] = Counter()
        self._handles: list[Any] = []

    def attach(self, chunk: torch.nn.Module, stage: int) -> None:
        """Hook every module of a model chunk, which is the ``stage``-th of the whole pipeline."""
        position = Counter[str]()
        for local, module in chunk.named_modules():
            name = whole_name(chunk, local)
            if _LEFT_OUT.search(name) or type(module).__name__ in _EMPTY:
                continue
            if not name:
                if not getattr(chunk, "post_process", True):
                    continue
                name = "loss"
            kind = kind_of(name, module, gated=self._gated)
            hook = self._hook(name, kind, stage, position)
            self._handles.append(module.register_forward_hook(hook))

    def detach(self) -> None:
        """Remove the hooks on modules; those on tensors go with the tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run(self, microbatch: int, forward: Callable[[], Any]) -> Any:
        """``forward()``, whose modules run for ``microbatch``. What runs outside is recomputation."""
        self._current = microbatch
        try:
            return forward()
        finally:
            self._current = None

    def _hook(self, name: str, kind: Kind, stage: int, position: Counter[str]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, arguments: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is None:
                return
            microbatch = self._current
            if microbatch is None:
                # A schedule runs the backward passes of a chunk in the order of its micro-batches.
                microbatch = self._recomputed[name]
                self._recomputed[name] += 1
            where = place(kind, sequence_first(kind, tensor), self._frame(microbatch))
            if where is None:
                self.not_placed[name] = None
                return
            if name not in position:
                position[name] = len(position)
            order = (stage, position[name])
            if self._current is not None:
                self._take("forward", name, order, where, sequence_first(kind, tensor))
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda gradient: self._take(
                        "backward", name, order, where, sequence_first(kind, gradient), self._scale
                    )
                )

        return hook

    def _take(
        self, phase: str, name: str, order: tuple[int, int], where: Place, tensor: Tensor, scale: float = 1.0
    ) -> None:
        shape, index = where
        # The schedules free an output's storage once it is sent: this must be a copy.
        value = tensor.detach().to("cpu", copy=True)
        if scale != 1.0:
            value.mul_(scale)
        self.pieces.append(Piece(phase=phase, name=name, order=order, shape=shape, index=index, tensor=value))


def whole_name(chunk: torch.nn.Module, name: str) -> str:
    """``name`` of a module or parameter of ``chunk`` with its layer numbered over the whole model."""
    found = _LAYER.match(name)
    if found is None:
        return name
    layers: Any = chunk.get_submodule("decoder.layers")
    number = int(layers[int(found.group(1))].layer_number) - 1
    return f"decoder.layers.{number}{name[found.end() :]}"


def _first_tensor(output: Any) -> Tensor | None:
    candidates = output if isinstance(output, tuple | list) else (output,)
    first = candidates[0] if candidates else None
    return first if isinstance(first, Tensor) and first.is_floating_point() else None
