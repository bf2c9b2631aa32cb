"""Weight gradients of the output layer that ``defer_embedding_wgrad_compute`` puts off to the step's end.

Upstream's schedules compute them after the last backward, when a data-parallel reduction that overlaps with
it has begun. So such a weight is not ready before they are there, and a reduction that is started all the
same computes them first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mt_megatron.errors import MtMegatronError


@dataclass
class _Late:
    """Holds models weakly: it lies in a table of the whole process."""

    outputs: list[Tensor]
    """Output gradients that wait; empty: nothing is put off."""

    layer: weakref.ref[Any] | None = None
    """None: it is not known which one put them off."""

    tell: weakref.ref[Callable[[], None]] | None = None


_late: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weight -> _Late."""


def note_layer(weight: Tensor, layer: Any) -> None:
    """A forward pass of ``layer``, a ColumnParallelLinear that has its activations beside its buffer in
    ``activations_put_off``, with ``weight``."""
    outputs = layer.grad_output_buffer
    known = _late.get(weight)
    if known is None or known.outputs is not outputs:
        known = _late[weight] = _Late(outputs)
    known.layer = weakref.ref(layer)


def put_off(weight: Tensor, outputs: list[Tensor], grad_output: Tensor) -> None:
    """Keep ``grad_output`` in ``outputs`` until ``weight``'s gradient is computed from it."""
    known = _late.get(weight)
    if known is None or known.outputs is not outputs:
        _late[weight] = _Late(outputs)
    outputs.append(grad_output)


def is_late(weight: Tensor) -> bool:
    """True while a gradient of ``weight`` is put off and not computed yet."""
    known = _late.get(weight)
    return known is not None and bool(known.outputs)


def when_there(weight: Tensor, tell: Callable[[], None]) -> None:
    """Call ``tell``, which is held weakly, once the gradients of ``weight``, which is late, are there."""
    _late[weight].tell = weakref.ref(tell)


def is_there(weight: Tensor) -> None:
    """Tell whoever waits for the gradients of ``weight``."""
    known = _late.get(weight)
    if known is None or known.tell is None:
        return
    tell, known.tell = known.tell(), None
    if tell is not None:
        tell()


def before_reduction(weights: Iterable[Tensor]) -> None:
    """Compute what is late of ``weights``, whose gradients are about to be reduced."""
    for weight in weights if _late else ():
        if not is_late(weight):
            continue
        known = _late[weight]
        layer = None if known.layer is None else known.layer()
        if layer is None:
            raise MtMegatronError(
                f"{len(known.outputs)} weight gradient(s) of an output layer are put off while they are "
                "being reduced, and the layer was not called as a module; call it, or leave "
                "defer_embedding_wgrad_compute out"
            )
        from megatron.core.utils import drain_embedding_wgrad_compute

        known.tell = None  # The reduction starts now.
        drain_embedding_wgrad_compute(layer.config, layer.embedding_activation_buffer, known.outputs, weight)
