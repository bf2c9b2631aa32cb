"""Level ``full``: a layer's parts begin and end too, forward around the modules', backward by autograd's.

Backward begins for a module where the gradient of its output is complete and ends where that of its input
is, as the taps tell it. Nothing is left when the modules are let go between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any

from torch import nn

from mt_megatron.seams import events
from mt_megatron.seams.taps import Watch, watch

logger = logging.getLogger("mt_megatron")

DEPTH = 2
"""How far below a layer modules are watched: its attention, MLP and norms, and what those are made of."""


def watched(chunk: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Path, module and layer number (-1 outside of layers) of what is worth a span.

    Layers; in them what holds parameters, and attention's core, ``DEPTH`` levels down; and what lies beside
    the layers (embedding, final norm, output layer). Not an output layer that is fused with the loss: with
    hooks on it the whole micro-batch's logits would have to be made, and tracing changes no training.
    """
    fused = getattr(getattr(chunk, "config", None), "cross_entropy_loss_fusion", False)
    layers = {path: module for path, module in chunk.named_modules() if _is_layer(path, module)}
    around = {""}
    for path in layers:
        while path:
            path = path.rpartition(".")[0]
            around.add(path)
    for path, module in chunk.named_modules():
        if path in around or isinstance(module, nn.ModuleList):
            continue
        if fused and path.rpartition(".")[2] == "output_layer":
            continue
        if path in layers:
            yield _unwrapped(path), module, int(module.layer_number)
            continue
        inside = next((layer for layer in layers if path.startswith(layer + ".")), None)
        if inside is None:
            wanted, number = path.rpartition(".")[0] in around, -1
        else:
            wanted = path.removeprefix(inside + ".").count(".") < DEPTH
            number = int(layers[inside].layer_number)
        if wanted and (path.endswith("core_attention") or next(module.parameters(), None) is not None):
            yield _unwrapped(path), module, number


def _unwrapped(path: str) -> str:
    """Without what wraps the model: data parallelism, half precision."""
    while path.startswith("module."):
        path = path.removeprefix("module.")
    return path


def _is_layer(path: str, module: nn.Module) -> bool:
    above, _, last = path.rpartition(".")
    return hasattr(module, "layer_number") and last.isdigit() and above.endswith("layers")


class ModuleHooks:
    """Watches the chunks' modules, on and off; both between two steps in the training thread."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = tuple(chunks)
        self._watches: list[Watch] = []
        self._open = _Open()
        self._stop_hearing: Any = None
        self.failed: str | None = None

    @property
    def on(self) -> bool:
        """Whether anything is watched."""
        return bool(self._watches)

    def attach(self) -> None:
        """Watch what ``watched`` names; nothing when it is watched already."""
        if self._watches or self.failed is not None:
            return
        self._stop_hearing = events.subscribe(self._hear, {"backward"})
        for chunk in self._chunks:
            for path, module, number in watched(chunk):
                if not _is_layer(path, module):
                    # A layer's way forward has an event of its own.
                    self._watches.append(watch(module, around=_forward(path, number), errors="raise"))
                backward = _backward(self._open, path, number)
                # Spans of the way forward go on where those of backward fail.
                self._watches.append(watch(module, backward=backward, errors="raise", told=self._fail))

    def detach(self) -> None:
        """Leave every module as it was."""
        for each in reversed(self._watches):
            each.close()
        self._watches = []
        if self._stop_hearing is not None:
            self._stop_hearing()
            self._stop_hearing = None
        self._open = _Open()

    def _hear(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        if phase == "end":
            self._open.clear()

    def _fail(self, error: str) -> None:
        if self.failed is None:
            self.failed = error
            logger.warning("level full goes on without backward spans of modules: %s", self.failed)


def _forward(path: str, number: int) -> Callable[[], AbstractContextManager[None]]:
    """The span of a call of the module at ``path``; each event has a dict of its own."""
    return lambda: events.described("module", {"module": path, "direction": "forward", "number": number})


def _backward(open_: _Open, path: str, number: int) -> Callable[[bool], None]:
    def arrived(begins: bool) -> None:
        if begins:
            open_.begin(path, number)
        else:
            open_.end(path)

    return arrived


class _Open:
    """Modules whose backward has begun, the innermost last; autograd runs one at a time."""

    def __init__(self) -> None:
        self._open: list[tuple[str, AbstractContextManager[None], str]] = []
        """Path, span, how paths of its parts begin."""

        self._thread = 0

    def begin(self, path: str, number: int) -> None:
        opened = self._open
        # What is no part of the one before has it behind.
        while opened and not path.startswith(opened[-1][2]):
            opened.pop()[1].__exit__(None, None, None)
        span = events.described("module", {"module": path, "direction": "backward", "number": number})
        opened.append((path, span, path + "."))
        self._thread = get_ident()
        span.__enter__()

    def end(self, path: str) -> None:
        opened = self._open
        for index in range(len(opened) - 1, -1, -1):
            if opened[index][0] == path:
                while len(opened) > index:
                    opened.pop()[1].__exit__(None, None, None)
                return

    def clear(self) -> None:
        """Backward is over. An end belongs into the thread of its begin, or nowhere."""
        while self._open:
            _, span, _ = self._open.pop()
            if self._thread == get_ident():
                span.__exit__(None, None, None)
