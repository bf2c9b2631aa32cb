"""All experts' rows as codes and scales, cast at once for a device; no scale is shared between experts.

Rows are grouped by expert. Where rows share scales, where they are rotated, or where a kernel wants it, each
expert's rows are followed by zeros up to a multiple, so that no block holds rows of two experts. The codes
and scales of each expert are those of ``quantise`` for its rows alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from mt_megatron.fp8.device import casts as device_casts
from mt_megatron.fp8.formats import FORMATS, encode, rounded
from mt_megatron.fp8.quantise import (
    Quantised,
    _by_blocks,
    _sizes,
    _two_level,
    amax_of,
    rotated,
    scale_of,
)
from mt_megatron.fp8.recipe import Cast
from mt_megatron.seams.grouped_gemm import TokenGroups

KERNEL_ROWS = 16
"""Rows of each expert are a multiple of it where kernels read them: codes of a byte, 16 at once."""


@dataclass
class Layout:
    """Where the rows of each expert lie among padded ones."""

    groups: TokenGroups
    """Of the source."""

    multiple: int

    rows: int
    """Of all experts, padding included; on a device whose counts the host does not know as many as there
    may be."""

    ends: Tensor
    """int32 [experts]: one past each expert's last row, padding included."""

    place: Tensor | None
    """int64 [rows of the source]: where each is; None where nothing is padded."""

    def spread(self, x: Tensor) -> Tensor:
        """``x`` [rows of the source, columns] with the padding, zeros."""
        if self.place is None:
            return x
        return x.new_zeros(self.rows, x.shape[1]).index_copy_(0, self.place, x)

    def exact(self, x: Tensor) -> Tensor:
        """``x`` [rows, columns] without the padding."""
        return x if self.place is None else x.index_select(0, self.place)

    def owners(self, step: int = 1) -> Tensor:
        """int64: the expert of every row, or of every ``step`` rows, which must divide ``multiple``."""
        first = torch.arange(0, self.rows, step, device=self.ends.device)
        last = self.ends.numel() - 1
        return torch.searchsorted(self.ends.long(), first, right=True).clamp_max(last)

    @cached_property
    def starts(self) -> list[int]:
        """First row of each expert. Waits for the device."""
        padded = (_up(end - start, self.multiple) for start, end in self.groups.bounds())
        return [0, *accumulate(padded)][:-1]


def layout_of(groups: TokenGroups, multiple: int) -> Layout:
    """Rows padded for each expert to ``multiple``. Waits for no device."""
    if groups.on_host:
        counts = [end - start for start, end in groups.bounds()]
        rows = sum(_up(count, multiple) for count in counts)
        if rows == groups.rows:
            return Layout(groups, multiple, rows, groups.ends, None)
    else:
        rows = _up(groups.rows + groups.ends.numel() * (multiple - 1), multiple)
        if multiple == 1:
            return Layout(groups, multiple, rows, groups.ends, None)
    ends = groups.ends.long()
    counts_ = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts_ + multiple - 1) // multiple * multiple
    shift = (padded.cumsum(0) - padded) - (ends - counts_)
    row = torch.arange(groups.rows, device=ends.device)
    owner = torch.searchsorted(ends, row, right=True)
    return Layout(groups, multiple, rows, padded.cumsum(0).int(), row + shift[owner])


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass
class GroupedQuantised:
    """One operand of a grouped product."""

    cast: Cast
    along: int
    """0: the product sums over rows; 1: over columns."""

    layout: Layout
    codes: Tensor
    """[rows with padding, columns]."""

    inverse: Tensor
    """fp32: [experts] for scales per tensor; [rows, 1], or [experts, columns] where rows are summed over, for
    scales per row; one for each block."""

    second: Tensor | None = None
    """fp32 [experts]: what multiplies e4m3 block scales."""

    _experts: dict[int, Quantised] = field(default_factory=dict)

    def turned(self) -> GroupedQuantised:
        """The same codes for a product that sums over the other dimension."""
        return GroupedQuantised(self.cast, 1 - self.along, self.layout, self.codes, self.inverse, self.second)

    def of(self, expert: int) -> Quantised:
        """One expert's operand, the same each time. Waits for the device."""
        if expert not in self._experts:
            self._experts[expert] = self._of(expert)
        return self._experts[expert]

    def _of(self, expert: int) -> Quantised:
        start, end = self.layout.groups.bounds()[expert]
        count, first = end - start, self.layout.starts[expert]
        kept = _up(count, self.cast.hadamard) if self.cast.hadamard and self.along == 0 else count
        return Quantised(
            cast=self.cast,
            along=self.along,
            shape=(count, self.codes.shape[1]),
            codes=self.codes[first : first + kept],
            inverse=self._inverse_of(expert, first, count),
            second=None if self.second is None else self.second[expert],
        )

    def _inverse_of(self, expert: int, first: int, count: int) -> Tensor:
        if self.cast.granularity == "tensor":
            return self.inverse[expert]
        if self.cast.granularity == "row":
            return self.inverse[first : first + count] if self.along == 1 else self.inverse[expert][None]
        rows = _sizes(self.cast, self.along)[0]
        return self.inverse[first // rows : first // rows + -(-count // rows)]


def multiple_of(cast: Cast, along: int, *, kernel: bool = False) -> int:
    """The multiple to which each expert's rows are padded before they are cast so."""
    found = KERNEL_ROWS if kernel else 1
    if cast.granularity == "block":
        found = max(found, _sizes(cast, along)[0])
    if along == 0:
        # Largest magnitudes of columns are those of groups of rows first.
        found = max(found, cast.hadamard, KERNEL_ROWS if cast.granularity == "row" else 1)
    return found


def quantise_groups(
    x: Tensor,
    groups: TokenGroups,
    cast: Cast,
    along: int,
    *,
    scales: Callable[[Tensor], Tensor] | None = None,
    generators: Callable[[int], torch.Generator] | None = None,
    kernel: bool = False,
) -> GroupedQuantised:
    """``x`` (bf16 or fp32 [rows, columns]) cast for a grouped product that sums over its dimension ``along``.

    ``scales`` gives, for casts per tensor, the experts' scales from their largest magnitudes (delayed
    scaling); ``generators`` draws for an expert. ``kernel``: rows are padded as kernels want them.
    """
    layout = layout_of(groups, multiple_of(cast, along, kernel=kernel))
    fmt, experts = FORMATS[cast.format], groups.ends.numel()
    x = layout.spread(x)
    if cast.hadamard:
        x = rotated(x, along, cast.hadamard)
    second, block = None, (1, max(x.shape[1], 1))
    if cast.granularity == "tensor":
        amax = _largest(_magnitude(x, 1), layout.owners(), experts)
        scale = scale_of(amax, fmt, power_of_2=cast.power_of_2) if scales is None else scales(amax)
        inverse = scale.reciprocal()
        scale = scale[layout.owners()][:, None]
    elif cast.granularity == "row" and along == 1:
        scale = scale_of(amax_of(x, cast, along), fmt, power_of_2=cast.power_of_2)
        inverse = scale.reciprocal()
    elif cast.granularity == "row":
        block, owners = (layout.multiple, 1), layout.owners(layout.multiple)
        blocks = x.view(-1, layout.multiple, x.shape[1])
        amax = _largest(blocks.abs().amax(dim=1).float(), owners, experts)
        scale = scale_of(amax, fmt, power_of_2=cast.power_of_2)
        inverse = scale.reciprocal()
        scale = scale[owners]
    else:
        block = _sizes(cast, along)
        amax = amax_of(x, cast, along)
        if cast.block_scale == "e4m3":
            owners = layout.owners(_sizes(cast, along)[0])
            whole = _largest(amax.amax(dim=1), owners, experts)
            scale, inverse, _ = _two_level(amax, fmt, whole[owners][:, None])
            second = _two_level(whole, fmt, whole)[2]
        else:
            scale = scale_of(amax, fmt, power_of_2=cast.power_of_2)
            inverse = scale.reciprocal()
    kernels = device_casts.kernels_for(x)
    if kernels is not None and fmt.dtype is not None and not cast.stochastic:
        turned = along == 0 and cast.granularity != "block"
        kind = kernels.BLOCKS
        if block[0] == 1 and scale.shape[1] == 1:
            kind, block = kernels.ROWS, (1, 1)
        codes = kernels.cast(x, scale, fmt, kind, turned=turned, block=block)
        return GroupedQuantised(cast, along, layout, codes, inverse, second)
    scaled = _by_blocks(x.float(), scale, block)
    if cast.stochastic:
        assert generators is not None, "stochastic rounding draws"
        noise = torch.zeros_like(scaled)
        for expert, (start, end) in enumerate(groups.bounds()):
            if end > start:
                first, count = layout.starts[expert], end - start
                if cast.hadamard and along == 0:
                    count = _up(count, cast.hadamard)
                drawn = torch.rand((count, x.shape[1]), generator=generators(expert), device=scaled.device)
                noise[first : first + count] = drawn
        codes = encode(rounded(scaled.clamp_(-fmt.maximum, fmt.maximum), fmt, noise), fmt)
    else:
        codes = encode(scaled, fmt)
    return GroupedQuantised(cast, along, layout, codes, inverse, second)


def _magnitude(x: Tensor, dim: int) -> Tensor:
    if not x.shape[dim]:
        return x.new_zeros(x.shape[1 - dim], dtype=torch.float32)
    kernels = device_casts.kernels_for(x)
    if kernels is not None:
        found: Tensor = kernels.amax(x, kernels.ROWS if dim == 1 else kernels.COLUMNS).flatten()
        return found
    # On the CPU one pass for both is slower along a dimension.
    return torch.maximum(-x.amin(dim=dim), x.amax(dim=dim)).float()


def _largest(values: Tensor, owners: Tensor, experts: int) -> Tensor:
    """The largest of each expert's rows of ``values`` (magnitudes, fp32); 0 without rows. NaN comes through
    as infinity, which makes the scale NaN too."""
    values = values.nan_to_num(nan=torch.inf, posinf=torch.inf)
    found = values.new_zeros(experts, *values.shape[1:])
    index = owners if values.dim() == 1 else owners[:, None].expand(-1, values.shape[1])
    return found.scatter_reduce_(0, index, values, "amax")
