"""Level ``full``: a layer's parts begin and end too, forward by hooks of the modules, backward by autograd's.

Backward begins for a module where the gradient of its output is complete and ends where that of its input
is: both are moments before a node of the graph runs, and there is one list per node of what begins or ends
with it, in forward order, gone through in reverse. Nothing is inserted into the graph, no tensor changes, and
nothing is left when the hooks are removed between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from mt_megatron.seams import events

logger = logging.getLogger("mt_megatron")

DEPTH = 2
"""How far below a layer modules are watched: its attention, MLP and norms, and what those are made of."""

_KEY = "mt_megatron.scan"


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
    """Hooks on the chunks' modules, on and off; both between two steps in the training thread."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = tuple(chunks)
        self._handles: list[Any] = []
        self._open = _Open()
        self._stop_hearing: Any = None
        self.failed: str | None = None

    @property
    def on(self) -> bool:
        """Whether anything is hooked."""
        return bool(self._handles)

    def attach(self) -> None:
        """Hook what ``watched`` names; nothing when it is hooked already."""
        if self._handles or self.failed is not None:
            return
        self._stop_hearing = events.subscribe(self._hear, {"backward"})
        for chunk in self._chunks:
            for path, module, number in watched(chunk):
                # A layer's way forward has an event of its own.
                before, after = self._around(path, number, forward=not _is_layer(path, module))
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after, always_call=True))

    def detach(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._stop_hearing is not None:
            self._stop_hearing()
            self._stop_hearing = None
        self._open = _Open()

    def _around(self, path: str, number: int, *, forward: bool) -> tuple[Any, Any]:
        attrs = {"module": path, "direction": "forward", "number": number}
        whole: list[bool] = []
        begun: list[AbstractContextManager[None]] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            try:
                node = _node((*args, *kwargs.values())) if torch.is_grad_enabled() else None
                # Both ends of its backward must be seen, or it has none here.
                whole.append(node is not None)
                if node is not None:
                    self._at(node).append(("end", path, number))
            except Exception as error:  # noqa: BLE001 - what is raised here, the step would raise
                self._fail(error)
            if forward:
                # A copy: each event has a dict of its own.
                span = events.described("module", {**attrs})
                begun.append(span)
                span.__enter__()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if forward and begun:
                begun.pop().__exit__(None, None, None)
            try:
                if whole.pop():
                    node = _node(output if isinstance(output, (tuple, list)) else (output,))
                    if node is not None:
                        self._at(node).append(("begin", path, number))
            except Exception as error:  # noqa: BLE001
                self._fail(error)

        return before, after

    def _at(self, node: Any) -> list[tuple[str, str, int]]:
        """What begins or ends before ``node`` runs backward."""
        points: list[tuple[str, str, int]] | None = node.metadata.get(_KEY)
        if points is None:
            kept: list[tuple[str, str, int]] = []
            points = node.metadata[_KEY] = kept
            open_ = self._open

            def arrived(gradients: Any) -> None:
                for what, path, number in reversed(kept):
                    if what == "begin":
                        open_.begin(path, number)
                    else:
                        open_.end(path)

            node.register_prehook(arrived)
        return points

    def _hear(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        if phase == "end":
            self._open.clear()

    def _fail(self, error: BaseException) -> None:
        if self.failed is None:
            self.failed = f"{type(error).__name__}: {error}"
            logger.warning("level full goes on without backward spans of modules: %s", self.failed)


class _Open:
    """Modules whose backward has begun, the innermost last; autograd runs one at a time."""

    def __init__(self) -> None:
        self._open: list[tuple[str, AbstractContextManager[None]]] = []
        self._thread = 0

    def begin(self, path: str, number: int) -> None:
        opened = self._open
        # What is no part of the one before has it behind.
        while opened and not path.startswith(opened[-1][0] + "."):
            opened.pop()[1].__exit__(None, None, None)
        span = events.described("module", {"module": path, "direction": "backward", "number": number})
        opened.append((path, span))
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
            _, span = self._open.pop()
            if self._thread == get_ident():
                span.__exit__(None, None, None)


def _node(values: Iterable[Any]) -> Any:
    """The graph's node that made the first of ``values`` that has one."""
    for value in values:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value.grad_fn
    return None
