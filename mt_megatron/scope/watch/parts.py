"""The partial sums of one step, kept on the device and brought to the host in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_megatron.backends.dtypes import wide_float
from mt_megatron.scope.format.statistics import OUTLIERS
from mt_megatron.scope.watch.sums import outliers_of

Layout = tuple[tuple[str, str, int], ...]
"""Path, statistic and length of the entries of a ``stats`` frame, in order."""

Values = NDArray[np.float64]


class Parts:
    """Sums of one step on one rank. Micro-batches add to it; float64 where the device has it."""

    def __init__(self, device: torch.device) -> None:
        self._dtype = wide_float(device)
        self._entries: dict[tuple[str, str], _Entry] = {}

    def add(self, path: str, statistic: str, sums: Sequence[Tensor | float] | Tensor) -> None:
        """Add ``sums``: a vector, or tensors [] followed by numbers that the host knows."""
        device: Tensor | None
        known: list[float] = []
        if isinstance(sums, Tensor):
            device = sums.reshape(-1)
        else:
            tensors = [each for each in sums if isinstance(each, Tensor)]
            known = [float(each) for each in sums[len(tensors) :]]
            device = torch.stack(tensors) if tensors else None
        key = (path, statistic)
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = _Sums(known)
        elif known:
            found.known += known  # type: ignore[attr-defined]
        if device is not None:
            found.add(device, self._dtype)  # type: ignore[attr-defined]

    def largest(self, path: str, statistic: str, value: Tensor) -> None:
        """Take ``value`` [] into a maximum; NaN stays NaN."""
        value = value.reshape(1).to(self._dtype)
        self._entries.setdefault((path, statistic), _Largest(value)).take(value)  # type: ignore[attr-defined]

    def outliers(self, path: str, maxima: Tensor, squares: Tensor, count: int) -> None:
        """Take ``sums.channel_maxima`` and the sum of squares of ``count`` elements into
        ``outlier_channels``."""
        entry = self._entries.setdefault((path, "outlier_channels"), _Outliers(maxima))
        entry.take(maxima, squares, count, self._dtype)  # type: ignore[attr-defined]

    def moments(self, path: str, count: int, powers: Tensor, ends: Tensor) -> None:
        """Take in what ``sums.moments`` found of ``count`` elements."""
        entry = self._entries.setdefault((path, "moments"), _Moments(ends.to(self._dtype)))
        entry.take(count, powers, ends.to(self._dtype))  # type: ignore[attr-defined]

    def taken(self) -> tuple[Layout, Tensor, Callable[[Values], Values]]:
        """The layout, a vector on the device, and what makes the frame's values of its copy on the host."""
        entries = list(self._entries.values())
        pieces = [entry.device(self._dtype) for entry in entries]
        lengths = [0 if piece is None else piece.numel() for piece in pieces]
        there = [piece for piece in pieces if piece is not None]
        joined = torch.cat(there) if there else torch.zeros(0, dtype=self._dtype)
        for entry in entries:
            # What waits for a sidecar would keep them, and with them memory of the device.
            entry.release()
        ends = np.cumsum([0, *lengths])

        def values(copy: Values) -> Values:
            parts = [
                entry.values(np.asarray(copy[ends[index] : ends[index + 1]], np.float64))
                for index, entry in enumerate(entries)
            ]
            return np.concatenate(parts) if parts else np.zeros(0)

        layout = tuple(
            (path, statistic, len(entry.values(np.zeros(length))))
            for ((path, statistic), entry), length in zip(self._entries.items(), lengths, strict=True)
        )
        return layout, joined, values


class _Entry(Protocol):
    def device(self, dtype: torch.dtype) -> Tensor | None:
        """What is to be copied; None where the host knows everything."""

    def release(self) -> None:
        """Let the tensors go: ``device`` has given what they hold."""

    def values(self, copy: Values) -> Values:
        """The part, of its copy."""


class _Sums:
    def __init__(self, known: Sequence[float]) -> None:
        self.known = np.asarray(known, np.float64)
        self._sums: Tensor | None = None

    def add(self, sums: Tensor, dtype: torch.dtype) -> None:
        if self._sums is None:
            self._sums = sums.to(dtype, copy=True)
        else:
            self._sums.add_(sums)

    def device(self, dtype: torch.dtype) -> Tensor | None:
        return self._sums

    def release(self) -> None:
        self._sums = None

    def values(self, copy: Values) -> Values:
        return np.concatenate((copy, self.known))


class _Largest:
    def __init__(self, value: Tensor) -> None:
        self._value: Tensor | None = value

    def take(self, value: Tensor) -> None:
        assert self._value is not None
        self._value = torch.maximum(self._value, value)

    def device(self, dtype: torch.dtype) -> Tensor | None:
        return self._value

    def release(self) -> None:
        self._value = None

    def values(self, copy: Values) -> Values:
        return copy


class _Outliers:
    def __init__(self, maxima: Tensor) -> None:
        self._maxima: Tensor | None = maxima.clone()
        self._squares: Tensor | None = None
        self._count = 0

    def take(self, maxima: Tensor, squares: Tensor, count: int, dtype: torch.dtype) -> None:
        assert self._maxima is not None
        torch.maximum(self._maxima, maxima, out=self._maxima)
        squares = squares.reshape(1).to(dtype)
        self._squares = squares if self._squares is None else self._squares + squares
        self._count += count

    def device(self, dtype: torch.dtype) -> Tensor | None:
        assert self._squares is not None and self._maxima is not None
        return torch.cat((outliers_of(self._maxima).to(dtype), self._squares))

    def release(self) -> None:
        self._maxima = self._squares = None

    def values(self, copy: Values) -> Values:
        return np.concatenate((copy[: 2 * OUTLIERS + 1], [self._count]))


class _Moments:
    def __init__(self, ends: Tensor) -> None:
        self._ends: Tensor | None = ends
        self._powers: Tensor | None = None
        self._count = 0

    def take(self, count: int, powers: Tensor, ends: Tensor) -> None:
        assert self._ends is not None
        low, high = torch.minimum(self._ends[0], ends[0]), torch.maximum(self._ends[1], ends[1])
        self._ends = torch.stack((low, high))
        self._powers = powers.to(ends.dtype) if self._powers is None else self._powers + powers
        self._count += count

    def device(self, dtype: torch.dtype) -> Tensor | None:
        assert self._powers is not None and self._ends is not None
        return torch.cat((self._powers, self._ends))

    def release(self) -> None:
        self._ends = self._powers = None

    def values(self, copy: Values) -> Values:
        return np.concatenate(([self._count], copy))
