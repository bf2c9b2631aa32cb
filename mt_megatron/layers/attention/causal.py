"""Causal attention on a CPU from batched matrix products, where torch's kernel is slow.

torch's CPU kernel multiplies in small tiles outside of the matrix library: in bf16 it is no faster
than in fp32. Here a few heads at a time and ``_QUERIES`` queries at a time, so that the scores stay in
the caches and almost half of the square is never computed. As in torch's kernel, scores and their
gradient are products accumulated and kept in fp32; weights are rounded to the values' dtype before they
multiply values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_QUERIES = 128
_SCORES = 1 << 20
"""Scores that are worked on at a time: few enough for a processor's caches, enough to be worth a call."""

_DTYPES = (torch.float32, torch.bfloat16)


def suits(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether ``causal_attention`` takes these: on a CPU, fp32 or bf16, no dropout, and long enough to gain.

    Autocast decides dtypes for torch's kernel and is not looked at here.
    """
    return (
        query.device.type == "cpu"
        and type(query) is type(key) is type(value) is Tensor
        and query.dtype in _DTYPES
        and query.dtype is key.dtype is value.dtype
        and not dropout
        and query.size(2) == key.size(2) >= _QUERIES // 2
        and not torch.is_autocast_enabled("cpu")
    )


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``softmax(scale * q k^T) v`` where query i sees keys 0 to i.

    ``query`` [b, heads, s, d], ``key`` [b, groups, s, d] and ``value`` [b, groups, s, d_value] in any
    strides, ``heads`` a multiple of ``groups``. Returns [s, b, heads * d_value], contiguous.
    """
    output: Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return output


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(length, batch, heads, value.size(-1))
        lse = torch.empty(batch, heads, length, dtype=torch.float32)
        by_head = output.permute(1, 2, 0, 3)
        with _exact_products_of(query.dtype):
            for row, of_query, of_key in _shares(query, key):
                q = _wide(query[row, of_query])
                k, v = _wide(key[row, of_key]), value[row, of_key].contiguous()
                for rows in _queries(length):
                    scores = _scores(q, k, rows, scale)
                    _diagonal(scores, rows, -torch.inf)
                    largest = scores.amax(-1)
                    torch.softmax(scores, -1, out=scores)
                    # The largest weight is 1 / the sum of exponentials.
                    part = largest.sub_(scores.amax(-1).log_())
                    lse[row, of_query, rows] = part.flatten(0, 1)
                    weights = scores.flatten(1, 2).to(value.dtype)
                    found = torch.bmm(weights, v[:, : rows.stop])
                    by_head[row, of_query, rows] = found.view(-1, rows.stop - rows.start, v.size(-1))
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, output, lse)
        return output.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        by_head, scale = output.permute(1, 2, 0, 3), ctx.scale
        grad = grad.view(output.shape).permute(1, 2, 0, 3)
        grads = [_like(t) for t in (query, key, value)]
        with _exact_products_of(query.dtype):
            for row, of_query, of_key in _shares(query, key):
                groups = of_key.stop - of_key.start
                share = (row, of_query)
                q, k, v = _wide(query[share]), _wide(key[row, of_key]), _wide(value[row, of_key])
                incoming = _wide(grad[share])
                # Row sums of weight times gradient of the weight, without either of them.
                delta = (incoming * by_head[share]).sum(-1).neg_()
                grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
                for rows in _queries(query.size(2)):
                    seen = slice(0, rows.stop)
                    minus = lse[row, of_query, rows].neg().view(groups, -1, 1)
                    weights = _product(minus, q, k, rows, scale).exp_()
                    weights = _diagonal(
                        weights.view(groups, -1, rows.stop - rows.start, rows.stop), rows, 0.0
                    )
                    weights = weights.flatten(1, 2)
                    through = _product(delta[:, rows].reshape(groups, -1, 1), incoming, v, rows, 1.0)
                    through.mul_(weights)
                    grad_v[:, seen] += torch.bmm(weights.mT, _grouped(incoming[:, rows], groups))
                    grad_k[:, seen] += torch.bmm(through.mT, _grouped(q[:, rows], groups))
                    found = torch.bmm(through, k[:, seen]).mul_(scale)
                    grads[0][row, of_query, rows] = found.view(-1, rows.stop - rows.start, q.size(-1))
                grads[1][row, of_key] = grad_k.mul_(scale)
                grads[2][row, of_key] = grad_v
        return (*grads, None)


def _shares(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """(sequence, query heads, key groups) of each share of the heads that is worked on at once."""
    batch, heads, length, _ = query.shape
    groups = key.size(1)
    repeats = heads // groups
    most = max(1, _SCORES // (repeats * min(_QUERIES, length) * length))
    for row in range(batch):
        for first in range(0, groups, most):
            last = min(groups, first + most)
            yield row, slice(first * repeats, last * repeats), slice(first, last)


def _queries(length: int) -> Iterator[slice]:
    for start in range(0, length, _QUERIES):
        yield slice(start, min(length, start + _QUERIES))


def _wide(part: Tensor) -> Tensor:
    return part.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _grouped(rows: Tensor, groups: int) -> Tensor:
    """[heads, n, d] -> [groups, heads per group * n, d]."""
    return rows.reshape(groups, -1, rows.size(-1))


def _scores(q: Tensor, k: Tensor, rows: slice, scale: float) -> Tensor:
    """[groups, heads per group, rows, keys up to the last row] in fp32."""
    # Scaled afterwards: before, the factors would be numbers that bf16 does not hold.
    found = torch.bmm(_grouped(q[:, rows], k.size(0)), k[:, : rows.stop].mT).mul_(scale)
    return found.view(k.size(0), -1, rows.stop - rows.start, rows.stop)


def _product(start: Tensor, left: Tensor, right: Tensor, rows: slice, scale: float) -> Tensor:
    """``start + scale * left right^T`` for some rows of ``left`` [heads, s, d], by group, in fp32."""
    return torch.baddbmm(start, _grouped(left[:, rows], right.size(0)), right[:, : rows.stop].mT, alpha=scale)


@contextmanager
def _exact_products_of(dtype: torch.dtype) -> Iterator[None]:
    """Within it fp32 products of bf16 numbers run on the bf16 units: the factors are narrowed back
    without loss, and sums are fp32 as before. Nothing changes for fp32 numbers."""
    before = torch.get_float32_matmul_precision()
    wanted = "medium" if dtype is torch.bfloat16 else before
    if wanted == before:
        yield
        return
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _diagonal(scores: Tensor, rows: slice, value: float) -> Tensor:
    """Put ``value`` where a key comes after the query, in place."""
    scores[..., rows.start :].masked_fill_(_after(rows.stop - rows.start), value)
    return scores


@cache
def _after(count: int) -> Tensor:
    """Where a key comes after the query, bool [count, count]; there are no more than ``_QUERIES`` of them."""
    return torch.ones(count, count, dtype=torch.bool).triu_(1)


def _like(tensor: Tensor) -> Tensor:
    """Uninitialised, [b, heads, s, d] over contiguous [s, b, heads, d]: as the projections made it."""
    batch, heads, length, size = tensor.shape
    return tensor.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)
