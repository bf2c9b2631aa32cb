"""Level ``full``: a layer's parts begin and end too, forward around the modules', backward by autograd's.

Backward begins for a module where the gradient of its output is complete and ends where that of its input
is: both are moments before a node of the graph runs, and there is one list per node of what begins or ends
with it, in forward order, gone through in reverse. Nothing is inserted into the graph, no tensor changes, and
nothing is left when the modules are let go between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import update_wrapper
from threading import get_ident
from typing import Any

from torch import Tensor, is_grad_enabled, nn

from mt_megatron.seams import events

logger = logging.getLogger("mt_megatron")

DEPTH = 2
"""How far below a layer modules are watched: its attention, MLP and norms, and what those are made of."""

_KEY = "mt_megatron.scan"

_Point = tuple[bool, str, int]
"""Whether the backward of a module begins there (else it ends), the module's path, the layer's number."""


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
    """Watches the chunks' modules, on and off; both between two steps in the training thread.

    ``module.forward`` is replaced on the module itself: torch takes ten times as long to call its own hooks.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = tuple(chunks)
        self._watched: list[tuple[nn.Module, Callable[..., Any], bool]] = []
        """Module, what stands for its ``forward``, whether that of the module itself was replaced."""

        self._live = [False]
        self._open = _Open()
        self._stop_hearing: Any = None
        self.failed: str | None = None

    @property
    def on(self) -> bool:
        """Whether anything is watched."""
        return bool(self._watched)

    def attach(self) -> None:
        """Watch what ``watched`` names; nothing when it is watched already."""
        if self._watched or self.failed is not None:
            return
        self._stop_hearing = events.subscribe(self._hear, {"backward"})
        self._live = [True]
        for chunk in self._chunks:
            for path, module, number in watched(chunk):
                own = "forward" in vars(module)
                # A layer's way forward has an event of its own.
                forward = self._around(module.forward, path, number, spans=not _is_layer(path, module))
                module.forward = forward
                self._watched.append((module, forward, own))

    def detach(self) -> None:
        """Put every ``forward`` back."""
        self._live[0] = False
        for module, forward, own in reversed(self._watched):
            # Who replaced it after us calls ours, which does nothing more from now on.
            if vars(module).get("forward") is forward:
                del module.forward
                if own:
                    module.forward = forward.__wrapped__
        self._watched = []
        if self._stop_hearing is not None:
            self._stop_hearing()
            self._stop_hearing = None
        self._open = _Open()

    def _around(
        self, inner: Callable[..., Any], path: str, number: int, *, spans: bool
    ) -> Callable[..., Any]:
        attrs = {"module": path, "direction": "forward", "number": number}
        live = self._live
        ends, begins = (False, path, number), (True, path, number)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not live[0]:
                return inner(*args, **kwargs)
            # Both ends of its backward must be seen, or it has none here.
            whole = is_grad_enabled() and self._mark(ends, args, kwargs)
            if spans:
                # A copy: each event has a dict of its own.
                with events.described("module", {**attrs}):
                    output = inner(*args, **kwargs)
            else:
                output = inner(*args, **kwargs)
            if whole:
                self._mark(begins, output if isinstance(output, (tuple, list)) else (output,))
            return output

        return _Forward(forward, inner)

    def _mark(self, point: _Point, values: Iterable[Any], named: Mapping[str, Any] | None = None) -> bool:
        """Note ``point`` at the node that made the first of the ``values``; whether there is one."""
        try:
            node = _node(values)
            if node is None and named:
                node = _node(named.values())
            if node is None:
                return False
            self._at(node).append(point)
        except Exception as error:  # noqa: BLE001 - what is raised here, the step would raise
            self._fail(error)
            return False
        return True

    def _at(self, node: Any) -> list[_Point]:
        """What begins or ends before ``node`` runs backward."""
        points: list[_Point] | None = node.metadata.get(_KEY)
        if points is None:
            kept: list[_Point] = []
            points = node.metadata[_KEY] = kept
            open_ = self._open

            def arrived(gradients: Any) -> None:
                for begins, path, number in reversed(kept):
                    if begins:
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


class _Forward:
    """Stands for a module's ``forward``, which is ``__wrapped__``."""

    def __init__(self, call: Callable[..., Any], inner: Callable[..., Any]) -> None:
        # Takes over the attributes of what it wraps, which may be of this class: ours come last.
        update_wrapper(self, inner)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copied module computes with its own weights, and is not watched.
        return deepcopy(self.__wrapped__, memo)  # type: ignore[attr-defined]


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


def _node(values: Iterable[Any]) -> Any:
    """The graph's node that made the first of ``values`` that has one."""
    for value in values:
        if isinstance(value, Tensor):
            node = value.grad_fn
            if node is not None:
                return node
    return None
