"""A transport that damages one message: the negative control of comparisons to the bit."""

from __future__ import annotations

from typing import Any

import torch


class Damaged:
    """``transport``, with the lowest bit of one element of the ``number``-th sent message flipped."""

    def __init__(self, transport: Any, number: int) -> None:
        self._transport = transport
        self._left = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post_send(self, edge: Any, tensor: torch.Tensor, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            tensor = tensor.detach().contiguous().clone()
            tensor.view(torch.uint8).view(-1)[tensor.nbytes // 2] ^= 1
        return self._transport.post_send(edge, tensor, **options)
