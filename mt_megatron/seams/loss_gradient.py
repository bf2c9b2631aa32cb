"""What the gradient of each token's loss is going to be, said before the loss is computed.

A trainer that knows its loss function knows this gradient before backward (mask over counted
tokens over micro-batches, times the loss scale). Told in advance, the output layer can compute its
gradients while it has the logits, and need not keep or recompute them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_announced: Tensor | None = None


@contextmanager
def announced_loss_gradient(gradient: Tensor | None) -> Iterator[None]:
    """Within it, a forward pass may count on ``gradient``, float32 [b, s]: what backward is going to
    bring for every per-token loss of that pass. None announces nothing.

    A promise with consequences: weight gradients may be added to ``main_grad`` during forward. When
    backward brings another gradient, the difference is computed and added then, at the price of
    another pass; when backward never comes, ``main_grad`` has to be thrown away.
    """
    global _announced
    outer, _announced = _announced, gradient
    try:
        yield
    finally:
        _announced = outer


def announced() -> Tensor | None:
    """The gradient that was announced for the forward pass that runs now."""
    return _announced
