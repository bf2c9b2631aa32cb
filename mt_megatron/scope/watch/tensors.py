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
        exact = values.numel() <= EXACT
        each = columns * 4 if exact else columns + 8 * -(-columns // 64)
        if self.size + rows * each > self._most:
            self.dropped += rows * each
            return
        self.size += rows * each
        step = max(1, MOST_FRAME // each)
        for first in range(0, rows, step):
            piece = values[first : first + step]
            at = (offset[0] + first, offset[1])
            common = {"path": path, "what": what, "microbatch": microbatch, "index": index, "shape": shape}
            if exact:
                self.held.append(
                    Held(**common, offset=at, data=piece.float().clone(), scale=None, low=None, error=None)  # type: ignore[arg-type]
                )
                continue
            tiles = tiles_of(piece)
            self.held.append(
                Held(
                    **common,  # type: ignore[arg-type]
                    offset=at,
                    data=tiles.codes.contiguous(),
                    scale=tiles.scale,
                    low=tiles.low,
                    error=tiles.error,
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
