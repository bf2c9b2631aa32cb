"""Attention of some queries to some keys that keeps what is needed to merge it with other keys.

Blockwise softmax (arXiv:2205.14135, section 3; arXiv:2310.01889): attending to two sets of keys
gives two outputs, each normalised by its own sum of exponentials, and the logarithms of these sums
say how to weigh them. The backward pass of a block needs only the merged output and the merged
logarithm. Everything here is [batch, heads, tokens, head size]; keys and values may have fewer
heads, each shared by as many consecutive query heads.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("mt_megatron")

_LARGEST_TILE = 2**22
"""Scores that the kernel in tiles holds at a time."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How the scores of one block are made."""

    scale: float
    """Factor of the products of queries and keys."""

    causal: bool = False
    """Whether query i sees keys 0 to i alone; then there are as many queries as keys."""

    forbidden: Tensor | None = None
    """bool, broadcastable to [b, heads, queries, keys]: True where attending is forbidden."""

    dropout: float = 0.0
    """Probability with which a weight is dropped."""


Kept = tuple[Tensor | None, ...]
"""What the forward pass of a block keeps for its backward pass: dropout masks, or what a kernel wants
to see again."""


def block_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Kept]:
    """Output [b, heads, queries, d] in q's dtype, the log of the sum of exponentials [b, heads, queries]
    in fp32 (fp64 for fp64; -inf where a query sees no key, whose output is 0), and what to keep."""
    kernel = _fused_kernel(q, scores)
    if kernel == "cpu":
        k, v = _expanded(q, k, v)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, scores.causal, scale=scores.scale
        )
        return output, lse, ()
    if kernel == "cuda":
        output, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
            q, *_expanded(q, k, v), 0.0, scores.causal, False, scale=scores.scale
        )
        sequences_q, sequences_k, _, _, random_state, unused = rest[:6]
        return output, lse, (sequences_q, sequences_k, random_state, unused)
    return _tiled_forward(q, k, v, scores)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, scores: Scores, kept: Kept
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from this block. ``output`` and ``lse`` are those of all blocks merged."""
    kernel = _fused_kernel(q, scores)
    if kernel is None:
        return _tiled_backward(grad, q, k, v, output, lse, scores, kept)
    groups = k.size(1)
    k, v = _expanded(q, k, v)
    if kernel == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, lse, 0.0, scores.causal, scale=scores.scale
        )
    else:
        sequences_q, sequences_k, random_state, unused = kept
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, output, lse.contiguous(), sequences_q, sequences_k, q.size(2), k.size(2),
            0.0, scores.causal, random_state, unused, scale=scores.scale,
        )  # fmt: skip
    return dq, _summed_over_groups(dk, groups), _summed_over_groups(dv, groups)


class Merged:
    """Outputs of several blocks of the same queries, weighed as one softmax over all their keys.

    ``output`` [b, heads, queries, d] and ``lse`` [b, heads, queries] are fp32 (fp64 for fp64).
    """

    def __init__(self, q: Tensor, value_size: int) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.output = torch.zeros(*q.shape[:-1], value_size, dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)

    def add(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        """Take in a block that the queries ``rows`` attended to."""
        merged, before = self.output[:, :, rows], self.lse[:, :, rows]
        after = torch.logaddexp(before, lse.to(before.dtype))
        # A query that has seen nothing yet: -inf - -inf would be NaN.
        base = after.masked_fill(after == -torch.inf, 0.0)
        merged.mul_((before - base).exp_().unsqueeze(-1))
        merged.add_(output * (lse - base).exp_().unsqueeze(-1))
        before.copy_(after)


def _fused_kernel(q: Tensor, scores: Scores) -> str | None:
    """Whose kernel of torch's can do this block and returns the logarithm; None: compute it in tiles."""
    kind, dtype, size = q.device.type, q.dtype, q.size(-1)
    if scores.forbidden is not None or scores.dropout:
        # For a row without keys they return 0 instead of -inf, and some know no dropout.
        why = "masks and sliding windows" if scores.forbidden is not None else "dropout"
    elif kind == "cpu":
        return "cpu"
    elif kind != "cuda":
        why = "this device"
    elif dtype not in (torch.bfloat16, torch.float16):
        why = str(dtype)
    elif size % 8 or size > 256:
        why = f"a head size of {size}"
    else:
        return "cuda"
    _say_tiled(kind, why)
    return None


@functools.cache
def _say_tiled(kind: str, why: str) -> None:
    logger.warning(
        "context parallel attention on %s: a fused kernel that returns the log-sum-exp was asked for, there "
        "is none for %s, so the scores are computed in tiles, in fp32 or wider",
        kind,
        why,
    )


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    repeats = q.size(1) // k.size(1)
    if repeats == 1:
        return k, v
    return k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)


def _summed_over_groups(gradient: Tensor, groups: int) -> Tensor:
    if gradient.size(1) == groups:
        return gradient
    wide = torch.promote_types(gradient.dtype, torch.float32)
    total: Tensor = gradient.unflatten(1, (groups, -1)).sum(2, dtype=wide)
    return total


def _tiles(q: Tensor, k: Tensor) -> list[slice]:
    rows = max(1, _LARGEST_TILE // (q.size(0) * q.size(1) * k.size(2)))
    return [slice(start, min(start + rows, q.size(2))) for start in range(0, q.size(2), rows)]


def _tile_scores(q: Tensor, k: Tensor, rows: slice, scores: Scores) -> Tensor:
    """[b, heads, rows, keys] in fp32, -inf where attending is forbidden."""
    found = _folded(q[:, :, rows], k.size(1)) @ k.mT
    found = _unfolded(found, q.size(1)).mul_(scores.scale)
    if scores.causal:
        keys = torch.arange(k.size(2), device=q.device)
        found.masked_fill_(keys > keys[rows, None], -torch.inf)
    if scores.forbidden is not None:
        forbidden = scores.forbidden
        if forbidden.size(-2) > 1:
            forbidden = forbidden[..., rows, :]
        found.masked_fill_(forbidden, -torch.inf)
    return found


def _folded(heads: Tensor, groups: int) -> Tensor:
    """[b, heads, n, x] -> [b, groups, heads per group * n, x]: one matrix product per group."""
    batch, _, _, size = heads.shape
    return heads.reshape(batch, groups, -1, size)


def _unfolded(groups: Tensor, heads: int) -> Tensor:
    batch, count, rows, size = groups.shape
    return groups.reshape(batch, heads, rows * count // heads, size)


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Kept]:
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v, dtype = q.to(wide), k.to(wide), v.to(wide), q.dtype
    outputs, logs, kept = [], [], list[Tensor]()
    for rows in _tiles(q, k):
        found = _tile_scores(q, k, rows, scores)
        lse = found.logsumexp(-1)
        weights = _weights(found, lse)
        if scores.dropout:
            kept.append(torch.rand_like(weights) >= scores.dropout)
            weights = weights * kept[-1] / (1 - scores.dropout)
        outputs.append(_unfolded(_folded(weights, k.size(1)) @ v, q.size(1)))
        logs.append(lse)
    return torch.cat(outputs, 2).to(dtype), torch.cat(logs, 2), tuple(kept)


def _weights(found: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); zeros in rows that see nothing, whose lse is -inf."""
    return found.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()


def _tiled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, scores: Scores, kept: Kept
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    grad, q, k, v = (t.to(wide) for t in (grad, q, k, v))
    # Row sums of weight times gradient of the weight, without either of them.
    delta = (grad * output).sum(-1, keepdim=True)
    groups, heads = k.size(1), q.size(1)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for index, rows in enumerate(_tiles(q, k)):
        weights = _weights(_tile_scores(q, k, rows, scores), lse[:, :, rows])
        incoming = _folded(grad[:, :, rows], groups)
        through = _unfolded(incoming @ v.mT, heads)
        dropped = weights
        if scores.dropout:
            mask = kept[index]
            assert mask is not None
            factor = mask / (1 - scores.dropout)
            dropped, through = weights * factor, through * factor
        dv += _folded(dropped, groups).mT @ incoming
        through = _folded(weights.mul_(through - delta[:, :, rows]), groups).mul_(scores.scale)
        dq[:, :, rows] = _unfolded(through @ k, heads)
        dk += through.mT @ _folded(q[:, :, rows], groups)
    return dq, dk, dv


def kernel_of(q: Tensor, scores: Scores) -> Any:
    """Name of the kernel that ``block_forward`` takes: ``cpu``, ``cuda`` or ``tiles``."""
    return _fused_kernel(q, scores) or "tiles"
