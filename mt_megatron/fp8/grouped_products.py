"""Products of all experts' quantised operands: the device's grouped kernel, or expert by expert."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from mt_megatron.fp8 import products
from mt_megatron.fp8.device import casts as device_casts
from mt_megatron.fp8.grouped import KERNEL_ROWS, GroupedQuantised, Layout, layout_of
from mt_megatron.fp8.products import Compute
from mt_megatron.fp8.recipe import Product, Role
from mt_megatron.seams.grouped_gemm import TokenGroups, groups_from

_log = logging.getLogger("mt_megatron")


def grouped(
    role: Role,
    a: GroupedQuantised,
    b: GroupedQuantised,
    product: Product,
    dtype: torch.dtype,
    compute: Compute,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """The grouped product in ``dtype``: [rows, columns], for wgrad [experts, outputs, inputs].

    One call of the device's kernel where it has one for these scales and formats, otherwise ``compute`` for
    each expert that has rows. The grouped kernel writes bf16 alone: where ``out`` is wider and ``compute``
    can write it, scales per tensor, the experts are multiplied one by one.
    """
    wider = out is not None and torch.promote_types(dtype, out.dtype) is not dtype
    by_row = "row" in (a.cast.granularity, b.cast.granularity)
    if (
        compute is products.scaled_mm
        and suits(a, b, dtype)
        and (by_row or not wider)
        and has_kernel(a.codes.device.type)
    ):
        if wider:
            products.say_rounded(dtype)
        result = scaled_grouped_mm(role, a, b, product, dtype)
        if out is None:
            return result
        return out.add_(result) if accumulate else out.copy_(result)
    return _one_by_one(role, a, b, product, dtype, compute, out, accumulate)


def _one_by_one(
    role: Role,
    a: GroupedQuantised,
    b: GroupedQuantised,
    product: Product,
    dtype: torch.dtype,
    compute: Compute,
    out: Tensor | None,
    accumulate: bool,
) -> Tensor:
    bounds = a.layout.groups.bounds()
    if role == "wgrad":
        shape: tuple[int, ...] = (len(bounds), a.codes.shape[1], b.codes.shape[1])
    else:
        width = b.layout.groups.rows // len(bounds) if role == "fprop" else b.codes.shape[1]
        shape = (a.layout.groups.rows, width)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.codes.device)
    for expert, (start, end) in enumerate(bounds):
        into = out[expert] if role == "wgrad" else out[start:end]
        if end > start:
            compute(role, a.of(expert), b.of(expert), product, dtype, out=into, accumulate=accumulate)
        elif role == "wgrad" and not accumulate:
            into.zero_()
    return out


def suits(a: GroupedQuantised, b: GroupedQuantised, dtype: torch.dtype) -> bool:
    """``torch._scaled_grouped_mm`` takes the operands: e4m3, scales per tensor or row, bf16 out."""
    return dtype is torch.bfloat16 and all(
        each.cast.format == "e4m3" and each.cast.granularity in ("tensor", "row") for each in (a, b)
    )


def scaled_grouped_mm(
    role: Role, a: GroupedQuantised, b: GroupedQuantised, product: Product, dtype: torch.dtype
) -> Tensor:
    """The product by one call of ``torch._scaled_grouped_mm``, rows of each expert padded to 16.

    Both operands are read along the summed dimension. Scales per tensor are repeated for every row. Weight
    gradients of experts without rows, which a kernel need not write, are set to zero.
    """
    groups = a.layout.groups
    experts = groups.ends.numel()
    if not groups.rows:
        if role == "wgrad":
            return a.codes.new_zeros((experts, a.codes.shape[1], b.codes.shape[1]), dtype=dtype)
        width = b.layout.groups.rows // experts if role == "fprop" else b.codes.shape[1]
        return a.codes.new_empty((0, width), dtype=dtype)
    left, layout = _padded(a)
    if role == "wgrad":
        right, _ = _padded(b)
        result = torch._scaled_grouped_mm(
            device_casts.contiguous(left.t()),
            device_casts.contiguous(right.t()).t(),
            _column_scales(a, experts),
            _column_scales(b, experts),
            offs=layout.ends,
            out_dtype=dtype,
            use_fast_accum=product.fast_accumulate,
        )
        counts = groups.ends.diff(prepend=groups.ends.new_zeros(1))
        return result.masked_fill_((counts == 0).view(-1, 1, 1), 0)
    matrices = b.layout.exact(b.codes.view(torch.uint8)).view(b.codes.dtype)
    matrices = matrices.view(experts, -1, matrices.shape[1])
    if role == "fprop":
        matrices = matrices.transpose(1, 2)
    else:
        matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    inverse = b.inverse
    if b.cast.granularity == "tensor":
        inverse = inverse[:, None].expand(-1, matrices.shape[2])
    elif role == "fprop":
        inverse = b.layout.exact(inverse)
    result = torch._scaled_grouped_mm(
        left,
        matrices,
        _row_scales(a, layout),
        inverse.reshape(experts, -1).contiguous(),
        offs=layout.ends,
        out_dtype=dtype,
        use_fast_accum=product.fast_accumulate,
    )
    return layout.exact(result)


def _padded(operand: GroupedQuantised) -> tuple[Tensor, Layout]:
    """Codes with each expert's rows padded for kernels."""
    layout, codes = operand.layout, operand.codes
    if layout.multiple % KERNEL_ROWS == 0:
        return codes, layout
    wider = layout_of(layout.groups, KERNEL_ROWS)
    return wider.spread(layout.exact(codes.view(torch.uint8))).view(codes.dtype), wider


def _row_scales(operand: GroupedQuantised, layout: Layout) -> Tensor:
    """One fp32 scale for each padded row."""
    if operand.cast.granularity == "tensor":
        return operand.inverse[layout.owners()].contiguous()
    scales = (
        layout.spread(operand.layout.exact(operand.inverse))
        if layout is not operand.layout
        else operand.inverse
    )
    return scales.reshape(-1).contiguous()


def _column_scales(operand: GroupedQuantised, experts: int) -> Tensor:
    """One fp32 scale for each expert's column."""
    if operand.cast.granularity == "tensor":
        return operand.inverse[:, None].expand(experts, operand.codes.shape[1]).reshape(-1).contiguous()
    return operand.inverse.reshape(-1).contiguous()


_GROUPS = ((8, 0, 24, 16), (0, 16, 0, 8))
"""Rows of each expert that the kernel is asked for; some have none."""

_SIZE = 128


@cache
def has_kernel(kind: str) -> bool:
    """True where a device's ``torch._scaled_grouped_mm`` computes right results; logged where it does not."""
    if not hasattr(torch, "_scaled_grouped_mm"):
        return _without(kind, f"torch {torch.__version__} has none")
    try:
        right = all(_asked(rows, torch.device(kind)) for rows in _GROUPS)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return _without(kind, str(error).splitlines()[0])
    return right or _without(kind, "its results are wrong")


def _without(kind: str, why: str) -> bool:
    _log.warning("fp8: no grouped kernel on %s (%s): experts are multiplied one by one", kind, why)
    return False


def _asked(rows: tuple[int, ...], device: torch.device) -> bool:
    """True where all three products are those of a loop, on small whole numbers, which are exact."""
    from mt_megatron.fp8.recipe import CONTRACTED, PRESETS

    recipe, experts, total = PRESETS["rowwise"], len(rows), sum(rows)
    groups = groups_from(rows, total, device)
    whole = groups_from([_SIZE] * experts, experts * _SIZE, device)

    def cast(x: Tensor, role: Role, side: int, of: TokenGroups) -> GroupedQuantised:
        from mt_megatron.fp8.grouped import quantise_groups

        spec = recipe.product(role).b if side else recipe.product(role).a
        return quantise_groups(x, of, spec, CONTRACTED[role][side], kernel=True)

    def numbers(count: int, step: int) -> Tensor:
        flat = (torch.arange(count * _SIZE).mul_(step) % 11 % 3 - 1).bfloat16()
        return flat.view(count, _SIZE).to(device)

    x, grad, weights = numbers(total, 3), numbers(total, 5), numbers(experts * _SIZE, 7)
    pairs: tuple[tuple[Role, Tensor, Tensor, TokenGroups], ...] = (
        ("fprop", x, weights, whole),
        ("dgrad", grad, weights, whole),
        ("wgrad", grad, x, groups),
    )
    for role, left, right, of in pairs:
        a, b = cast(left, role, 0, groups), cast(right, role, 1, of)
        product = recipe.product(role)
        found = scaled_grouped_mm(role, a, b, product, torch.bfloat16)
        expected = _one_by_one(role, a, b, product, torch.bfloat16, products.reference, None, False)
        if not torch.equal(found, expected):
            return False
    return True
