"""Exact arithmetic of perturbations: what each kind makes of values, the same to the bit on every device.

Values of 32 bits or fewer are computed with in float32, each operation rounded by itself, and rounded to
their own type once; float64 in float64. Random numbers are float32. A bit flip computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab.random_numbers import drawn, key_of, normal, uniform
from mt_megatron.scope.lab.specification import Perturbation

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22
"""Elements that are changed at a time: temporary memory is some 60 bytes for each."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places of a tensor's elements in the whole tensor: flat, row by row.

    ``parts`` are int64 vectors whose lengths multiply to the number of elements; the place of element (i, j,
    ...) of the tensor viewed in these lengths is the sum of its entries in each.
    """

    parts: tuple[Tensor, ...]

    shape: tuple[int, ...]
    """Of the whole tensor."""

    whole: bool = True
    """False: the places are this rank's own, since how the whole would be numbered is not known."""

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Flat start of each block of elements, and their places (int64 [elements of the block])."""
        first, *others = self.parts
        inner = torch.zeros(1, dtype=torch.int64, device=first.device)
        for part in others:
            inner = (inner.unsqueeze(1) + part).flatten()
        rows = max(1, _BLOCK // max(1, inner.numel()))
        for start in range(0, first.numel(), rows):
            block = (first[start : start + rows].unsqueeze(1) + inner).flatten()
            yield start * inner.numel(), block

    def numel(self) -> int:
        """Elements."""
        count = 1
        for part in self.parts:
            count *= part.numel()
        return count

    def all(self) -> Tensor:
        """Places of all elements, int64 [numel]."""
        return torch.cat([block for _, block in self.blocks()])

    def to(self, device: torch.device) -> Places:
        """The same on ``device``."""
        parts = tuple(part.to(device) for part in self.parts)
        return Places(parts=parts, shape=self.shape, whole=self.whole)


@dataclass(frozen=True, kw_only=True)
class Along:
    """Coordinates along one dimension of the whole tensor that are meant."""

    stride: int
    size: int
    chosen: Tensor
    """bool [size]."""

    def __call__(self, places: Tensor) -> Tensor:
        """bool: which of ``places`` have such a coordinate."""
        return self.chosen.to(places.device)[(places // self.stride) % self.size]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Elements that are meant; all where nothing is said."""

    places: Tensor | None = None
    """int64: these places alone."""

    along: Along | None = None
    share: float | None = None

    def chosen(self, key: int, places: Tensor) -> Tensor | None:
        """bool for each of ``places``; None: all of them."""
        found: Tensor | None = None
        if self.places is not None:
            found = torch.isin(places, self.places.to(places.device))
        if self.along is not None:
            found = _both(found, self.along(places))
        if self.share is not None:
            found = _both(found, drawn(key_of(key, "share"), places, self.share))
        return found


def require_type(one: Perturbation, dtype: torch.dtype, path: str) -> None:
    """Raise ``ConfigError`` where ``one`` cannot be done to values of ``dtype``."""
    if not dtype.is_floating_point:
        raise ConfigError(f"found {path} of {_name(dtype)}; expected floating-point values")
    if dtype.itemsize == 1:
        raise ConfigError(f"found {path} of {_name(dtype)}; expected 16 bits or more")
    if one.kind == "bit_flip" and one.figures["bit"] >= 8 * dtype.itemsize:
        raise ConfigError(
            f"found bit: {one.figures['bit']:g} for {path} of {_name(dtype)}; expected 0 (the lowest) to "
            f"{8 * dtype.itemsize - 1}"
        )


@dataclass(kw_only=True)
class Tally:
    """Count of the elements that a perturbation has changed on this rank."""

    count: int = 0


def changed(
    values: Tensor,
    places: Places,
    selection: Selection,
    one: Perturbation,
    key: int,
    tally: Tally | None = None,
) -> Tensor:
    """A new tensor: ``values`` with the elements of ``selection`` changed as ``one`` says; ``tally`` counts
    them.

    ``places`` are on the device of ``values`` and number as many elements as it has.
    """
    # Nobody's view: schedules free what they have sent.
    result = values.detach().clone(memory_format=torch.contiguous_format)
    flat = result.view(-1)
    for start, block in places.blocks():
        chosen = selection.chosen(key, block)
        part = flat[start : start + block.numel()]
        at = None if chosen is None else chosen.nonzero().squeeze(1)
        if tally is not None:
            tally.count += block.numel() if at is None else at.numel()
        if at is None:
            part.copy_(_changed(part, block, one, key))
        elif at.numel():
            part[at] = _changed(part[at], block[at], one, key)
    return result


def derivative(values: Tensor, places: Places, selection: Selection, one: Perturbation, key: int) -> Tensor:
    """Factors of the gradient, in float32 (float64 for float64), of the shape of ``values``: how a changed
    element depends on the unchanged one."""
    factors = torch.ones(values.numel(), dtype=_computing(values.dtype), device=values.device)
    for start, block in places.blocks():
        chosen = selection.chosen(key, block)
        part = factors[start : start + block.numel()]
        if one.kind in ("mask", "stuck"):
            factor: Any = 0.0
        elif one.kind == "scale":
            factor = one.figures["factor"]
        elif one.relative:
            factor = _noise(block, one, key).to(part.dtype) + 1.0
        else:
            continue
        changed_part = torch.zeros_like(part) + factor
        part.copy_(changed_part if chosen is None else torch.where(chosen, changed_part, part))
    return factors.view(values.shape)


def _changed(values: Tensor, places: Tensor, one: Perturbation, key: int) -> Tensor:
    """Flat ``values``, all of them changed."""
    figures = one.figures
    if one.kind == "bit_flip":
        integer = _INTEGERS[values.dtype.itemsize]
        bit = int(figures["bit"])
        top = bit == 8 * values.dtype.itemsize - 1
        # The sign's mask does not fit into a signed integer as a positive number.
        mask = torch.tensor(-(1 << bit) if top else 1 << bit, dtype=integer, device=values.device)
        return (values.contiguous().view(integer) ^ mask).view(values.dtype)
    computed = values.to(_computing(values.dtype))
    if one.kind == "mask":
        computed = torch.zeros_like(computed)
    elif one.kind == "stuck":
        # Rounded first: a number beyond the type is infinite in it, and torch refuses to fill with one.
        value = torch.tensor(figures["value"], dtype=torch.float64).to(computed.dtype)
        computed = torch.full_like(computed, value.item())
    elif one.kind == "scale":
        computed = computed * figures["factor"]
    else:
        noise = _noise(places, one, key).to(computed.dtype)
        computed = computed * (noise + 1.0) if one.relative else computed + noise
    return computed.to(values.dtype)


def _noise(places: Tensor, one: Perturbation, key: int) -> Tensor:
    """float32."""
    figures = one.figures
    if one.kind == "gaussian":
        return normal(key_of(key, "value"), places) * figures["sigma"] + figures["mean"]
    return uniform(key_of(key, "value"), places) * (figures["high"] - figures["low"]) + figures["low"]


def _computing(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _both(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one & other


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
