"""The partial sums of one step, kept on the device and brought to the host in one copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_megatron.backends.dtypes import wide_float
from mt_megatron.scope.format.statistics import OUTLIERS
from mt_megatron.scope.watch.scalars import Combine
from mt_megatron.scope.watch.sums import outliers_of

Layout = tuple[tuple[str, str, int], ...]
"""Path, statistic and length of the entries of a ``stats`` frame, in order."""

Values = NDArray[np.float64]


def defers(device: torch.device) -> bool:
    """True where results of few kernels are kept and put together by the host. On an accelerator a small step
    takes as long as its kernels take to launch, and every operation on sums is one more; on a CPU the sums
    themselves are what takes time."""
    return device.type != "cpu"


class Parts:
    """Sums of one step on one rank. Micro-batches add to it; float64 where the device has it."""

    def __init__(self, device: torch.device, *, not_finite: threading.Event | None = None) -> None:
        """``not_finite`` is set, in the thread that makes a frame's values, where an element was not finite,
        and cleared where all were; frames that have no such statistic leave it."""
        self._dtype = wide_float(device)
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._not_finite = not_finite or threading.Event()
        self.defers = defers(device)
        """True where callers should prefer ``later``."""

        self.counts = self._not_finite.is_set()
        """True where elements that are not finite are counted, though results are deferred: they were some in
        the sampled step before."""

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

    def later(
        self,
        path: str,
        statistic: str,
        scalars: Sequence[Tensor],
        combine: Combine,
        known: Sequence[float] = (),
        *,
        reduce: Literal["sum", "max"] = "sum",
    ) -> None:
        """Keep ``scalars``, tensors [] in float32, until the host has them and makes sums of them and of the
        numbers ``known``."""
        entry = self._entries.setdefault((path, statistic), _Later(reduce))
        entry.keep(scalars, combine, known)  # type: ignore[attr-defined]

    def largest(self, path: str, statistic: str, value: Tensor) -> None:
        """Take ``value`` [] into a maximum; NaN stays NaN."""
        value = value.reshape(1).to(self._dtype)
        self._entries.setdefault((path, statistic), _Largest(value)).take(value)  # type: ignore[attr-defined]

    def outliers(self, path: str, maxima: Tensor, squares: Tensor, count: int) -> None:
        """Take ``sums.channel_maxima`` and the sum of squares of ``count`` elements into
        ``outlier_channels``; with ``defers`` ``squares`` is their norm."""
        entry = self._entries.get((path, "outlier_channels"))
        if entry is None:
            entry = self._entries[path, "outlier_channels"] = _Outliers(maxima)
        if self.defers:
            entry.norms.append(squares)  # type: ignore[attr-defined]
            entry.take(maxima, None, count, self._dtype)  # type: ignore[attr-defined]
            return
        entry.take(maxima, squares, count, self._dtype)  # type: ignore[attr-defined]

    def moments(self, path: str, count: int, powers: Tensor, ends: Tensor) -> None:
        """Take in what ``sums.moments`` found of ``count`` elements."""
        entry = self._entries.setdefault((path, "moments"), _Moments(ends.to(self._dtype)))
        entry.take(count, powers, ends.to(self._dtype))  # type: ignore[attr-defined]

    def taken(self) -> tuple[Layout, Tensor, Callable[[Values], Values]]:
        """The layout, a vector on the device, and what makes the frame's values of its copy on the host."""
        entries = list(self._entries.values())
        pieces = [entry.device(self._dtype) for entry in entries]
        there = [piece for piece in pieces if piece is not None]
        places, scalars = _scalars_of(entries)
        first = sum(piece.numel() for piece in there)
        if scalars:
            there.append(torch.stack(scalars).to(self._dtype))
        joined = torch.cat(there) if there else torch.zeros(0, dtype=self._dtype)
        begin = 0
        for index, piece in enumerate(pieces):
            if piece is not None:
                places[index] = np.arange(begin, begin + piece.numel())
                begin += piece.numel()
            else:
                places[index] += first
        for entry in entries:
            # What waits for a sidecar would keep them, and with them memory of the device.
            entry.release()
        names = [statistic for _, statistic in self._entries]

        def values(copy: Values) -> Values:
            copy = np.asarray(copy, np.float64)
            parts = [entry.values(copy[where]) for entry, where in zip(entries, places, strict=True)]
            counted = [part for name, part in zip(names, parts, strict=True) if name == "not_finite"]
            if any(part.any() for part in counted):
                self._not_finite.set()
            elif counted:
                self._not_finite.clear()
            return np.concatenate(parts) if parts else np.zeros(0)

        layout = tuple(
            (path, statistic, len(entry.values(np.zeros(len(where)))))
            for ((path, statistic), entry), where in zip(self._entries.items(), places, strict=True)
        )
        return layout, joined, values


def _scalars_of(entries: Sequence[_Entry]) -> tuple[list[NDArray[np.int64]], list[Tensor]]:
    """For each entry the places of its scalars in the list of all; several entries may keep the same one."""
    places, number, scalars = [], dict[int, int](), list[Tensor]()
    for entry in entries:
        own = entry.scalars if isinstance(entry, _Later) else []
        for each in own:
            if number.setdefault(id(each), len(scalars)) == len(scalars):
                scalars.append(each)
        places.append(np.asarray([number[id(each)] for each in own], np.int64))
    return places, [each if each.dtype is torch.float32 else each.float() for each in scalars]


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


_Kind = tuple[Combine, int]
"""How scalars of a call are combined, and how many they are."""


class _Later:
    """Scalars of many calls. They are put together per ``combine``, not per call: a frame has thousands."""

    def __init__(self, reduce: Literal["sum", "max"]) -> None:
        self._reduce = reduce
        self._tensors: dict[_Kind, list[Tensor]] = {}
        self._known: dict[_Kind, list[Sequence[float]]] = {}

    def keep(self, scalars: Sequence[Tensor], combine: Combine, known: Sequence[float]) -> None:
        kind = combine, len(scalars)
        self._tensors.setdefault(kind, []).extend(scalars)
        self._known.setdefault(kind, []).append(known)

    @property
    def scalars(self) -> list[Tensor]:
        return [each for tensors in self._tensors.values() for each in tensors]

    def device(self, dtype: torch.dtype) -> Tensor | None:
        return None

    def release(self) -> None:
        self._tensors = {}

    def values(self, copy: Values) -> Values:
        parts, at = [], 0
        with np.errstate(all="ignore"):
            for (combine, width), known in self._known.items():
                rows = copy[at : at + len(known) * width].reshape(len(known), width)
                at += rows.size
                parts.append(combine(rows, np.asarray(known, np.float64)))
        # NaN stays NaN in both.
        return np.asarray(np.sum(parts, axis=0) if self._reduce == "sum" else np.max(parts, axis=0))


class _Outliers:
    def __init__(self, maxima: Tensor) -> None:
        self._maxima: Tensor | None = maxima.clone()
        self._squares: Tensor | None = None
        self.norms: list[Tensor] = []
        """In the place of sums of squares."""

        self._count = 0

    def take(self, maxima: Tensor, squares: Tensor | None, count: int, dtype: torch.dtype) -> None:
        assert self._maxima is not None
        torch.maximum(self._maxima, maxima, out=self._maxima)
        self._count += count
        if squares is not None:
            squares = squares.reshape(1).to(dtype)
            self._squares = squares if self._squares is None else self._squares + squares

    def device(self, dtype: torch.dtype) -> Tensor | None:
        assert self._maxima is not None
        squares = self._squares
        if squares is None:
            squares = torch.stack(self.norms).to(dtype).square().sum().reshape(1)
        pairs = outliers_of(self._maxima.nan_to_num_(nan=float("inf"), posinf=float("inf")))
        return torch.cat((pairs.to(dtype), squares))

    def release(self) -> None:
        self._maxima = self._squares = None
        self.norms = []

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
