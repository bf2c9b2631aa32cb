"""Taps that take every module's output and the gradient that arrives at it, micro-batch by micro-batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mt_megatron.seams import taps
from mt_megatron.seams.taps import whole_name

from .pieces import Piece
from .place import Frame, Kind, Place, kind_of, place, sequence_first

# Containers whose output is that of their last module; attention's and experts' inner tensors have shapes
# that belong to an implementation.
_LEFT_OUT = re.compile(r"^(decoder|decoder\.layers)$|\.core_attention\.|\.experts\b")


# What a layer spec leaves empty hands its input on; another spec may have a norm of that name there.
_EMPTY = ("ModuleList", "IdentityOp", "IdentityFuncOp")


class Recorder:
    """Collects the pieces of one step on this rank."""

    def __init__(
        self,
        *,
        frame: Callable[[int], Frame],
        gradient_scale: float,
        gated: bool,
        seen: Callable[[], object] = lambda: None,
    ) -> None:
        """``frame(k)`` is where micro-batch ``k`` lies; gradients are multiplied by ``gradient_scale``;
        ``seen()`` is called at every output and at every gradient of an output."""
        self.pieces: list[Piece] = []
        self.not_placed: dict[str, None] = {}
        self._frame = frame
        self._scale = gradient_scale
        self._gated = gated
        self._seen = seen
        self._watches: list[taps.Watch] = []

    def attach(self, chunk: torch.nn.Module, stage: int) -> None:
        """Watch every module of a model chunk, which is the ``stage``-th of the whole pipeline."""
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
            self._watches.append(self._watched(module, name, kind, stage, position))

    @property
    def expected(self) -> int:
        """Outputs and gradients of one micro-batch."""
        return 2 * len(self._watches)

    def detach(self) -> None:
        """Let the modules go."""
        for each in self._watches:
            each.close()
        self._watches.clear()

    def _watched(
        self, module: torch.nn.Module, name: str, kind: Kind, stage: int, position: Counter[str]
    ) -> taps.Watch:
        def output(call: taps.Call, output: Any) -> None:
            self._seen()
            tensor = _first_tensor(output)
            if tensor is None:
                return
            tensor = sequence_first(kind, tensor)
            where = place(kind, tensor, self._frame(call.microbatch))
            if where is None:
                self.not_placed[name] = None
                return
            if name not in position:
                position[name] = len(position)
            self._take("forward", name, (stage, position[name]), where, tensor)

        def gradient(call: taps.Call, gradient: Tensor, index: int) -> None:
            if index or name not in position:
                return
            self._seen()
            gradient = sequence_first(kind, gradient)
            where = place(kind, gradient, self._frame(call.microbatch))
            if where is not None:
                self._take("backward", name, (stage, position[name]), where, gradient, self._scale)

        # A difference may begin in the logits, and an error here is the comparison's.
        return taps.watch(module, after=output, output_gradient=gradient, whole_output=True, errors="raise")

    def _take(
        self, phase: str, name: str, order: tuple[int, int], where: Place, tensor: Tensor, scale: float = 1.0
    ) -> None:
        shape, index = where
        # The schedules free an output's storage once it is sent: this must be a copy.
        value = tensor.detach().to("cpu", copy=True)
        if scale != 1.0:
            value.mul_(scale)
        self.pieces.append(Piece(phase=phase, name=name, order=order, shape=shape, index=index, tensor=value))


def _first_tensor(output: Any) -> Tensor | None:
    candidates = output if isinstance(output, tuple | list) else (output,)
    first = candidates[0] if candidates else None
    return first if isinstance(first, Tensor) and first.is_floating_point() else None
