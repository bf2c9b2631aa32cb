"""The partial sums of one step, kept on the device and brought to the host in one copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_megatron.backends.dtypes import wide_float
from mt_megatron.scope.watch.deferred import Deferred
from mt_megatron.scope.watch.scalars import Family
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
        self._deferred = Deferred()
        self._at_end: list[Callable[[Parts], None]] = []
        self._not_finite = not_finite or threading.Event()
        self.defers = defers(device)
        """True where callers should prefer ``later``."""

        self.nbytes = 0
        """Bytes of the host that what ``taken`` returned keeps, beside the copy."""

        self.counts = self._not_finite.is_set()
        """True where elements that are not finite are counted, though results are deferred: they were some in
        the sampled step before."""

    def add(self, path: str, statistic: str, sums: Sequence[Tensor | float] | Tensor) -> None:
        """Add ``sums``: a vector, or tensors [] followed by numbers that the host knows."""
        device: Tensor | None = None
        known: list[float] = []
        if isinstance(sums, Tensor):
            device = sums.reshape(-1)
        else:
            tensors = [each for each in sums if isinstance(each, Tensor)]
            known = [float(each) for each in sums[len(tensors) :]]
            device = torch.stack(tensors) if tensors else None
        found = self._entries.get((path, statistic))
        if found is None:
            found = self._entries[path, statistic] = _Sums(known)
        elif known:
            found.add_known(known)  # type: ignore[attr-defined]
        if device is not None:
            found.add(device, self._dtype)  # type: ignore[attr-defined]

    def later(
        self, family: Family, paths: Sequence[str], scalars: Sequence[Tensor], known: Sequence[float] = ()
    ) -> None:
        """Keep the ``scalars`` of a call, tensors [] in float32, until the host has them and makes parts of
        them and of the numbers ``known``, for each of ``paths``."""
        self._deferred.keep(family, paths, scalars, known)

    def leave_out(self, family: Family) -> None:
        """Forget the calls of ``family``: some are missing."""
        self._deferred.leave_out(family)

    def at_end(self, action: Callable[[Parts], None]) -> None:
        """Call ``action`` with this before the parts are taken: it may give more with ``later``."""
        self._at_end.append(action)

    def channels(self, path: str, maxima: Tensor) -> None:
        """Take in ``scalars.largest_of_channels`` of a layer's output, whose norm ``scalars.LAYER`` has:
        ``outlier_channels`` and ``activation_max``, and ``not_finite`` unless elements are counted."""
        self._deferred.channels(path, maxima)

    def largest(self, path: str, statistic: str, value: Tensor) -> None:
        """Take ``value`` [] into a maximum; NaN stays NaN."""
        value = value.reshape(1).to(self._dtype)
        self._entries.setdefault((path, statistic), _Largest(value)).take(value)  # type: ignore[attr-defined]

    def outliers(self, path: str, maxima: Tensor, squares: Tensor, count: int) -> None:
        """Take ``sums.channel_maxima`` and the sum of squares of ``count`` elements into
        ``outlier_channels``."""
        entry = self._entries.get((path, "outlier_channels"))
        if entry is None:
            entry = self._entries[path, "outlier_channels"] = _Outliers(maxima)
        entry.take(maxima, squares, count, self._dtype)  # type: ignore[attr-defined]

    def moments(self, path: str, count: int, powers: Tensor, ends: Tensor) -> None:
        """Take in what ``sums.moments`` found of ``count`` elements."""
        entry = self._entries.setdefault((path, "moments"), _Moments(ends.to(self._dtype)))
        entry.take(count, powers, ends.to(self._dtype))  # type: ignore[attr-defined]

    def taken(self) -> tuple[Layout, Tensor, Callable[[Values], Values]]:
        """The layout, a vector on the device, and what makes the frame's values of its copy on the host.
        Takes what is deferred: called once."""
        for action in self._at_end:
            action(self)
        deferred = self._deferred.taken(counts=self.counts)
        entries = list(self._entries.items())
        pieces = [entry.device(self._dtype) for _, entry in entries]
        there = [*(piece for piece in pieces if piece is not None)]
        places, begin = [], 0
        for piece in pieces:
            size = 0 if piece is None else piece.numel()
            places.append(slice(begin, begin + size))
            begin += size
        there += [vector.to(self._dtype) for vector in deferred.vectors]
        joined = torch.cat(there) if there else torch.zeros(0, dtype=self._dtype)
        lengths = {
            key: place.stop - place.start + entry.more
            for (key, entry), place in zip(entries, places, strict=True)
        }
        for key, length in deferred.lengths.items():
            lengths.setdefault(key, length)
        first, total = {}, 0
        for key, length in lengths.items():
            first[key] = total
            total += length
        counted = [first[key] + n for key in first if key[1] == "not_finite" for n in (0, 1)]
        # Parcels that wait for a sidecar would keep them, and with them memory of the device.
        deferred.vectors.clear()
        self.nbytes = deferred.nbytes
        for _, entry in entries:
            entry.release()

        def values(copy: Values) -> Values:
            copy = np.asarray(copy, np.float64)
            found = np.zeros(total)
            for (key, entry), place in zip(entries, places, strict=True):
                found[first[key] : first[key] + lengths[key]] = entry.values(copy[place])
            deferred.add(copy[begin:], first, found)
            if found[counted].any():
                self._not_finite.set()
            elif counted:
                self._not_finite.clear()
            return found

        return tuple((path, name, length) for (path, name), length in lengths.items()), joined, values


class _Entry(Protocol):
    @property
    def more(self) -> int:
        """Elements of the part beside those that are copied."""

    def device(self, dtype: torch.dtype) -> Tensor | None:
        """What is to be copied; None where the host knows everything."""

    def release(self) -> None:
        """Let the tensors go: ``device`` has given what they hold."""

    def values(self, copy: Values) -> Values:
        """The part, of its copy."""


class _Sums:
    def __init__(self, known: list[float]) -> None:
        self.known = known
        self._sums: Tensor | None = None

    @property
    def more(self) -> int:
        return len(self.known)

    def add_known(self, known: list[float]) -> None:
        self.known = [a + b for a, b in zip(self.known, known, strict=True)]

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
    more = 0

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
    more = 1

    def __init__(self, maxima: Tensor) -> None:
        self._maxima: Tensor | None = maxima.clone()
        self._squares: Tensor | None = None
        self._count = 0

    def take(self, maxima: Tensor, squares: Tensor, count: int, dtype: torch.dtype) -> None:
        assert self._maxima is not None
        torch.maximum(self._maxima, maxima, out=self._maxima)
        self._count += count
        squares = squares.reshape(1).to(dtype)
        self._squares = squares if self._squares is None else self._squares + squares

    def device(self, dtype: torch.dtype) -> Tensor | None:
        assert self._maxima is not None and self._squares is not None
        return torch.cat((outliers_of(self._maxima).to(dtype), self._squares))

    def release(self) -> None:
        self._maxima = self._squares = None

    def values(self, copy: Values) -> Values:
        return np.append(copy, self._count)


class _Moments:
    more = 1

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
