"""Scalars of a step's calls, kept on the device until its end and put together by the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_megatron.scope.format.statistics import OUTLIERS
from mt_megatron.scope.watch.scalars import LAYER, Family, Values
from mt_megatron.scope.watch.sums import outliers_of

Key = tuple[str, str]
"""Path and statistic."""

_PAIRS = 2 * OUTLIERS

MOST_SINGLE = 4096
"""Scalars that are tensors of their own: an allocator may give each 512 bytes."""


@dataclass
class _Calls:
    """Calls of one family."""

    places: list[int] = field(default_factory=list)
    """Numbers of its scalars among all, call by call."""

    known: list[float] = field(default_factory=list)
    count: int = 0
    paths: list[str] = field(default_factory=list)
    of: list[int] = field(default_factory=list)
    """Number of the call that a path in ``paths`` counts; a call may count for several."""


class Deferred:
    """Scalars that ``Parts`` defers. Calls cost a few list entries each; all else is done once a step."""

    def __init__(self) -> None:
        self._calls: dict[Family, _Calls] = {}
        self._channels: dict[str, Tensor] = {}
        """Largest absolute values of a layer's channels, by its path."""

        self._single: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        """Of ``_single``, by identity, among all scalars."""

        self._joined: list[Tensor] = []
        """Scalars before those."""

        self._count = 0
        """Of ``_joined``'s."""

    def keep(
        self, family: Family, paths: Sequence[str], scalars: Sequence[Tensor], known: Sequence[float]
    ) -> None:
        """Keep a call's ``scalars``, tensors [], for each of ``paths``."""
        calls = self._calls.get(family)
        if calls is None:
            calls = self._calls[family] = _Calls()
        if len(self._single) + len(scalars) > MOST_SINGLE:
            self._join()
        for scalar in scalars:
            # Of several calls' scalars one may be the same tensor: it is copied once.
            number = self._numbers.setdefault(id(scalar), self._count + len(self._single))
            if number == self._count + len(self._single):
                self._single.append(scalar)
            calls.places.append(number)
        calls.known += known
        for path in paths:
            calls.paths.append(path)
            calls.of.append(calls.count)
        calls.count += 1

    def _join(self) -> None:
        if self._single:
            each_float = (each if each.dtype is torch.float32 else each.float() for each in self._single)
            self._joined.append(torch.stack(list(each_float)))
        self._count += len(self._single)
        self._single, self._numbers = [], {}

    def channels(self, path: str, maxima: Tensor) -> None:
        """Take in ``scalars.largest_of_channels`` of a layer's output, whose norm is kept in ``LAYER``."""
        found = self._channels.get(path)
        self._channels[path] = maxima if found is None else torch.maximum(found, maxima)

    def leave_out(self, family: Family) -> None:
        """Forget the calls of ``family``."""
        self._calls.pop(family, None)

    def taken(self, *, counts: bool) -> Taken:
        """Everything, which is forgotten here: what waits for a sidecar would keep memory of the device.
        ``counts``: elements that are not finite are counted elsewhere."""
        self._join()
        taken = Taken(self._calls, self._channels, self._joined, counts=counts)
        self._calls, self._channels, self._joined, self._count = {}, {}, [], 0
        return taken


class Taken:
    """Vectors on the device, and how the host makes parts of their copies."""

    def __init__(
        self,
        calls: dict[Family, _Calls],
        channels: dict[str, Tensor],
        scalars: Sequence[Tensor],
        *,
        counts: bool,
    ) -> None:
        """``scalars``: vectors, in the order of the calls' places."""
        self.lengths: dict[Key, int] = {}
        """Of the parts."""

        self._places: list[tuple[Family, NDArray[np.int64], Values, list[str], NDArray[np.int64]]] = []
        for family, each in calls.items():
            at = np.asarray(each.places, np.int64).reshape(each.count, -1)
            known = np.asarray(each.known, np.float64).reshape(each.count, -1)
            self._places.append((family, at, known, each.paths, np.asarray(each.of, np.int64)))
            paths = dict.fromkeys(each.paths)
            for statistic, length, _ in family.statistics:
                self.lengths |= dict.fromkeys(((path, statistic) for path in paths), length)
        self._paths: list[str] = []
        self._counts = counts
        self.vectors: list[Tensor] = []
        """The layers' channels, then the scalars."""

        for width in dict.fromkeys(each.numel() for each in channels.values()):
            alike = {path: each for path, each in channels.items() if each.numel() == width}
            self._paths += alike
            self.vectors.append(_of_channels(list(alike.values())).reshape(-1))
        for path in self._paths:
            self.lengths |= {(path, "activation_max"): 1, (path, "outlier_channels"): _PAIRS + 2}
            if not counts:
                self.lengths[path, "not_finite"] = 2
        self.vectors += scalars

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps on the host, beside the copy."""
        return sum(
            at.nbytes + known.nbytes + of.nbytes + 8 * len(paths) for _, at, known, paths, of in self._places
        )

    def add(self, copy: Values, first: dict[Key, int], values: Values) -> None:
        """Add the parts to ``values``, each from its place ``first``, made of the copied ``vectors``."""
        of_channels = copy[: len(self._paths) * (_PAIRS + 3)].reshape(-1, _PAIRS + 3)
        scalars = copy[of_channels.size :]
        with np.errstate(all="ignore"):
            for family, at, known, paths, of in self._places:
                parts = family.combine(scalars[at], known)[of]
                column = 0
                for statistic, length, reduce in family.statistics:
                    there = {path: first[path, statistic] for path in dict.fromkeys(paths)}
                    where = np.asarray([there[path] for path in paths], np.int64)
                    if reduce == "max":
                        # NaN stays NaN.
                        values[list(there.values())] = -np.inf
                        np.maximum.at(values, where, parts[:, column])
                    else:
                        each = where[:, None] + np.arange(length)
                        np.add.at(values, each, parts[:, column : column + length])
                    column += length
        for path, row in zip(self._paths, of_channels, strict=True):
            begin = first[path, "outlier_channels"]
            values[begin : begin + _PAIRS] = row[:_PAIRS]
            squares = first[path, LAYER.statistics[0][0]]
            values[begin + _PAIRS : begin + _PAIRS + 2] = values[squares : squares + 2]
            values[first[path, "activation_max"]] = row[_PAIRS]
            if not self._counts:
                at_least = first[path, "not_finite"]
                values[at_least : at_least + 2] = row[_PAIRS + 1 :]


def _of_channels(maxima: Sequence[Tensor]) -> Tensor:
    """For each layer the pairs of ``outlier_channels``, the largest absolute value (NaN where an element
    was), and how many channels have NaN and infinite elements, float [layers, 2 * OUTLIERS + 3]."""
    rows = torch.stack(list(maxima))
    found = torch.stack((rows.amax(dim=1), rows.isnan().sum(dim=1), rows.isinf().sum(dim=1)), dim=1)
    pairs = outliers_of(rows.nan_to_num_(nan=float("inf"), posinf=float("inf")))
    return torch.cat((pairs, found), dim=1)
