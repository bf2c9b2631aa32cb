"""The products of a linear whose weight each expert has of its own, by role, as one call.

Rows are grouped by expert. A weight's recipe has a grouped form of its own; whoever replaces the GEMMs
of all linears (``seams.gemm.set_gemm``) gets these too, expert by expert; otherwise torch's grouped
kernel runs where the device has one and it is faster than products in a row.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mt_megatron.errors import ConfigError
from mt_megatron.seams import gemm as _single
from mt_megatron.seams import onednn
from mt_megatron.seams.gemm import GemmRole, WeightRef, computes_itself, gemm

_log = logging.getLogger("mt_megatron")

Verdict = Literal["whole", "mask", "none"]
"""``whole``: results are right. ``mask``: right but for the weight gradients of experts without rows, which
have to be set to zero. ``none``: there is no kernel, or its results are wrong."""

_GROUPS = ((0, 8, 16, 8), (8, 0, 0, 24), (8, 16, 8, 0), (0, 0, 32, 0))
"""Rows of each expert: the first has none, one in the middle, the last, all but one. Where all have none
no kernel is asked."""

_SIZE = 128


@cache
def verdict(kind: str, index: int | None, dtype: torch.dtype) -> Verdict:
    """What the kernel of device ``kind:index`` does with ``dtype``, logged unless all is right."""
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    if not hasattr(torch, "_grouped_mm"):
        return _without_kernel(kind, f"torch {torch.__version__} has none")
    try:
        found = [_ask(rows, device, dtype) for rows in _GROUPS]
    except (RuntimeError, NotImplementedError) as error:
        return _without_kernel(kind, str(error).splitlines()[0])
    if "none" in found:
        return _without_kernel(kind, "its results are wrong where experts have no rows")
    if "mask" in found:
        _log.warning(
            "experts: torch._grouped_mm on %s (%s) leaves the weight gradients of experts without rows "
            "unwritten; they are set to zero after each call",
            kind,
            dtype,
        )
        return "mask"
    return "whole"


def _without_kernel(kind: str, why: str) -> Verdict:
    _log.warning(
        "experts: torch._grouped_mm was asked for on %s; products one by one are used: %s", kind, why
    )
    return "none"


def _ask(rows: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Verdict:
    """The three products of one division into groups, beside the same products one by one."""
    # Small whole numbers: their sums are exact in any type and order. Not from a random stream.
    total, experts = sum(rows), len(rows)
    input = _numbers(total, _SIZE, 3).to(device, dtype)
    grad = _numbers(total, _SIZE, 5).to(device, dtype)
    weights = _numbers(experts * _SIZE, _SIZE, 7).view(experts, _SIZE, _SIZE).to(device, dtype)
    ends = torch.tensor(rows).cumsum(0).int().to(device)
    outputs, gradients = [], []
    for of_input, of_grad, weight in zip(input.split(rows), grad.split(rows), weights, strict=True):
        outputs.append(of_input @ weight.t())
        gradients.append(of_grad.t() @ of_input if len(of_input) else torch.zeros_like(weight))
    with _unwritten_memory_is_nan(device, dtype, (total * _SIZE, experts * _SIZE * _SIZE)):
        forward = torch._grouped_mm(input, weights.transpose(-2, -1), offs=ends)
        to_input = torch._grouped_mm(grad, weights, offs=ends)
        to_weights = torch._grouped_mm(grad.t(), input, offs=ends)
    if forward.device.type == "meta" or isinstance(forward, FakeTensor):
        return "whole"  # There are no numbers to look at.
    back = torch.cat([rows @ weight for rows, weight in zip(grad.split(rows), weights, strict=True)])
    if not (_equal(forward, torch.cat(outputs)) and _equal(to_input, back)):
        return "none"
    filled = [expert for expert, count in enumerate(rows) if count]
    expected = torch.stack(gradients)
    if not _equal(to_weights[filled], expected[filled]):
        return "none"
    return "whole" if _equal(to_weights, expected) else "mask"


def _numbers(rows: int, columns: int, step: int) -> Tensor:
    """-1, 0 and 1, float32 [rows, columns] on the host."""
    return (torch.arange(rows * columns).mul_(step) % 11 % 3 - 1).float().view(rows, columns)


def _equal(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.float().cpu(), expected.float().cpu())


@contextmanager
def _unwritten_memory_is_nan(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]
) -> Iterator[None]:
    """Inside, tensors that a kernel makes and does not write hold NaN: torch fills them in its deterministic
    mode, and memory that was freed last, which an allocator gives out again first, holds it too."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            freed = [torch.full((size,), torch.nan, dtype=dtype, device=device) for size in sizes * 2]
            del freed
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# The products.

_ALIGNMENT = 16  # bytes; torch's grouped kernels refuse other strides


@dataclass(frozen=True, kw_only=True)
class TokenGroups:
    """How ``rows`` rows are divided among experts, in their order."""

    ends: Tensor
    """int32 [experts], on the device: one past each expert's last row."""

    rows: int
    """The end of the last one, known to the host."""

    _bounds: list[list[tuple[int, int]]] = field(default_factory=list, compare=False, repr=False)

    @property
    def on_host(self) -> bool:
        """True where ``bounds`` waits for no device."""
        return bool(self._bounds) or self.ends.device.type == "cpu"

    def bounds(self) -> list[tuple[int, int]]:
        """First and one past the last row of each expert. Waits for the device, the first time."""
        if not self._bounds:
            ends = self.ends.tolist()
            self._bounds.append(list(zip([0, *ends[:-1]], ends, strict=True)))
        return self._bounds[0]

    def empty(self) -> list[int]:
        """The experts without rows. Waits for the device, as ``bounds`` does."""
        return [expert for expert, (start, end) in enumerate(self.bounds()) if start == end]


def groups_from(tokens_per_expert: Tensor | Sequence[int], rows: int, device: torch.device) -> TokenGroups:
    """The groups of so many rows for each expert, ``rows`` in all.

    Counts on the host are known to it; counts on ``device`` are not read. Raises ConfigError when counts
    on the host do not add up to ``rows``.
    """
    counts = torch.as_tensor(tokens_per_expert)
    ends = counts.cumsum(0)
    if counts.device.type != "cpu":
        return TokenGroups(ends=ends.int(), rows=rows)
    known = ends.tolist()
    if rows != (known[-1] if known else 0):
        raise ConfigError(
            f"experts were given {rows} rows and counts that add up to {known[-1] if known else 0}; "
            "tokens_per_expert must count the rows of each expert"
        )
    groups = TokenGroups(ends=ends.int().to(device, non_blocking=True), rows=rows)
    groups._bounds.append(list(zip([0, *known[:-1]], known, strict=True)))
    return groups


def grouped_gemm(
    role: GemmRole,
    a: Any,
    b: Any,
    groups: TokenGroups,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    recipe: Any = None,
    weight: WeightRef | None = None,
) -> Tensor:
    """``seams.gemm.gemm`` of every expert's rows; E experts, T rows, K inputs, N outputs each.

    ======  ================  ====================  ================
    role    ``a``             ``b``                 result
    ======  ================  ====================  ================
    fprop   input (T, K)      weights (E, N, K)     output (T, N)
    dgrad   grad out (T, N)   weights (E, N, K)     grad in (T, K)
    wgrad   grad out (T, N)   input (T, K)          grad w (E, N, K)
    ======  ================  ====================  ================

    An expert without rows has a weight gradient of zero. ``out``, ``accumulate``, ``recipe`` and
    ``weight`` are as for ``gemm``; rows may be what ``prepared`` returned for these ``groups``.
    """
    if weight is not None and computes_itself(recipe):
        made: Tensor = recipe.grouped(role, a, b, groups, weight, out=out, accumulate=accumulate)
        return made
    if recipe is None and _single.is_plain() and has_grouped_kernel(a, b):
        result = _by_kernel(role, a, b, groups)
        if out is None:
            return result
        return out.add_(result) if accumulate else out.copy_(result)

    def product(expert: int, *operands: Any, **how: Any) -> Tensor:
        return gemm(*operands, recipe=recipe, **how)

    return one_by_one(role, a, b, groups, product, out, accumulate)


def _by_kernel(role: GemmRole, a: Tensor, b: Tensor, groups: TokenGroups) -> Tensor:
    if not groups.rows:
        # Kernels need not know products of nothing.
        if role == "wgrad":
            return a.new_zeros(groups.ends.numel(), a.shape[1], b.shape[1])
        return a.new_empty(0, b.shape[1 if role == "fprop" else 2])
    if role == "fprop":
        return torch._grouped_mm(a, b.transpose(-2, -1), offs=groups.ends)
    if role == "dgrad":
        return torch._grouped_mm(a, b, offs=groups.ends)
    result = torch._grouped_mm(a.t(), b, offs=groups.ends)
    if verdict(a.device.type, a.device.index, a.dtype) == "mask":
        counts = groups.ends.diff(prepend=groups.ends.new_zeros(1))
        result.masked_fill_((counts == 0).view(-1, 1, 1), 0)
    return result


def one_by_one(
    role: GemmRole,
    a: Tensor,
    b: Tensor,
    groups: TokenGroups,
    product: Callable[..., Tensor],
    out: Tensor | None,
    accumulate: bool,
) -> Tensor:
    """The grouped product from ``product(expert, role, a, b, out=, accumulate=)`` of each expert that has
    rows."""
    bounds = groups.bounds()
    if role == "wgrad":
        if out is None:
            out = a.new_empty(len(bounds), a.shape[1], b.shape[1])
        for expert, (start, end) in enumerate(bounds):
            if end > start:
                product(expert, role, a[start:end], b[start:end], out=out[expert], accumulate=accumulate)
            elif not accumulate:
                out[expert].zero_()
        return out
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1 if role == "fprop" else 2])
    for expert, (start, end) in enumerate(bounds):
        if end > start:
            product(expert, role, a[start:end], b[expert], out=out[start:end], accumulate=accumulate)
    return out


def compiled_for_each_shape(like: Tensor) -> bool:
    """Whether products with ``like`` cost a compilation for every number of rows: oneDNN's do."""
    if like.device.type != "cpu":
        return False
    return like.dtype in (torch.bfloat16, torch.float16) or (_single.is_plain() and onednn.preferred(like))


def has_grouped_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether ``torch._grouped_mm`` takes such operands here and is the faster way."""
    if a.device.type == "cpu":
        # It is a loop over the same products there, and a loop of ours keeps an expert's rows in cache.
        return False
    if a.dtype is not b.dtype or a.dtype is not torch.bfloat16:
        return False
    if any(size * a.element_size() % _ALIGNMENT for size in (*a.shape[1:], *b.shape[1:])):
        return False
    return verdict(a.device.type, a.device.index, a.dtype) != "none"
