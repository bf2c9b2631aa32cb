"""Tensors of one step: encoded on the device, copied in the background, framed in the sender's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mt_megatron.scope.watch.tiles import EXACT, tiles_of

MOST_FRAME = 4 * 2**20
"""Bytes of one frame's tensor; larger ones are cut by rows. An encoder holds a few copies of a frame."""

MOST_STEP = 16 * 2**20
"""Bytes of the tensors of one rank and step; what is beyond is dropped and counted. With the step's tokens
they have room in the sender's queue, which would drop what a sidecar cannot take at once."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """One encoded matrix on the device."""

    path: str
    what: str
    microbatch: int
    index: Mapping[str, int]
    shape: tuple[int, int]
    """Of the whole."""

    offset: tuple[int, int]
    """Of this rank's part within it."""

    data: Tensor
    scale: Tensor | None
    low: Tensor | None
    error: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Everything that is to be copied."""
        return [each for each in (self.data, self.scale, self.low, self.error) if each is not None]

    def about(self) -> dict[str, Any]:
        """Everything else that a frame says. What waits for a sidecar keeps this and the copies alone: with
        the tensors it would keep memory of the device."""
        return {
            "path": self.path,
            "what": self.what,
            "microbatch": self.microbatch,
            "index": dict(self.index),
            "shape": list(self.shape),
            "offset": list(self.offset),
            "encoding": "f32" if self.scale is None else "q8",
        }


class Tensors:
    """The tensors of one step on one rank."""

    def __init__(self, most_bytes: int = MOST_STEP) -> None:
        self.held: list[Held] = []
        self.size = 0
        self.dropped = 0
        """Bytes left out."""

        self._most = most_bytes

    def add(
        self,
        path: str,
        what: str,
        values: Tensor,
        *,
        index: Mapping[str, int],
        microbatch: int,
        shape: tuple[int, int],
        offset: tuple[int, int] = (0, 0),
    ) -> None:
        """Encode ``values`` [rows, columns], a part of a whole of ``shape`` that begins at ``offset``."""
        rows, columns = values.shape
        if rows == 0 or columns == 0:
            return
        each = _bytes_of_row(values)
        if self.size + rows * each > self._most:
            self.dropped += rows * each
            return
        self.size += rows * each
        step = max(1, MOST_FRAME // each)
        about = {"path": path, "what": what, "microbatch": microbatch, "shape": shape}
        for first in range(0, rows, step):
            piece = values[None, first : first + step]
            # A small whole is sent exactly, a small end of a large one as the rest of it.
            self._encode(piece, [index], (offset[0] + first, offset[1]), about, values.numel() <= EXACT)

    def add_alike(
        self,
        path: str,
        what: str,
        values: Tensor,
        *,
        indices: Sequence[Mapping[str, int]],
        microbatch: int,
        shape: tuple[int, int],
        offset: tuple[int, int] = (0, 0),
    ) -> None:
        """``add`` each of ``values`` [n, rows, columns] with its index, in the kernels of one."""
        count, rows, columns = values.shape
        size = rows * _bytes_of_row(values[0]) if count and rows and columns else 0
        if size == 0:
            return
        if size > MOST_FRAME:
            for own, index in zip(values, indices, strict=True):
                self.add(path, what, own, index=index, microbatch=microbatch, shape=shape, offset=offset)
            return
        fit = min(max(self._most - self.size, 0) // size, count)
        self.size += fit * size
        self.dropped += (count - fit) * size
        if fit:
            about = {"path": path, "what": what, "microbatch": microbatch, "shape": shape}
            self._encode(values[:fit], indices[:fit], offset, about, rows * columns <= EXACT)

    def _encode(
        self,
        values: Tensor,
        indices: Sequence[Mapping[str, int]],
        offset: tuple[int, int],
        about: Mapping[str, Any],
        exact: bool,
    ) -> None:
        rows = values.size(1)
        if exact:
            copies = values.float().clone()
            self.held += [
                Held(**about, index=index, offset=offset, data=data, scale=None, low=None, error=None)
                for index, data in zip(indices, copies, strict=True)
            ]
            return
        tiles = tiles_of(values)
        codes = tiles.codes.contiguous()
        for number, index in enumerate(indices):
            own = slice(number * rows, (number + 1) * rows)
            self.held.append(
                Held(
                    **about,
                    index=index,
                    offset=offset,
                    data=codes[own],
                    scale=tiles.scale[own],
                    low=tiles.low[own],
                    error=tiles.error[number],
                )
            )

    def divide(self, what: str, by: int | None) -> None:
        """Divide all held ``what`` by a number; None: leave them out."""
        if by is None:
            self.held = [each for each in self.held if each.what != what]
            return
        for each in self.held:
            if each.what == what:
                scaled = (each.data,) if each.scale is None else (each.scale, each.low, each.error)
                for values in scaled:
                    if values is not None:
                        values.div_(by)


def _bytes_of_row(values: Tensor) -> int:
    """Of a matrix as it is sent."""
    columns = values.size(1)
    return columns * 4 if values.numel() <= EXACT else columns + 8 * -(-columns // 64)


def frames_of(
    about: Sequence[Mapping[str, Any]],
    copies: Callable[[], Sequence[np.ndarray[Any, Any]]],
    common: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """``tensor`` frames; ``about``: ``Held.about`` of each, ``copies`` gives their tensors in order, on the
    host."""
    arrays = iter(copies())
    for each in about:
        data, scale, low, error = next(arrays), None, None, 0.0
        if each["encoding"] == "q8":
            scale, low, error = next(arrays), next(arrays), float(next(arrays))
        yield {
            "k": "tensor",
            **common,
            **each,
            "data": data,
            "scale": scale,
            "low": low,
            "error": error,
        }
