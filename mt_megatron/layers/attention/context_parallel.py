"""Attention over a sequence whose tokens are spread over a context-parallel group.

Each rank has the queries, keys and values of its two chunks (``parallel.context_parallel``). Keys and
values come from the other ranks, un-expanded (``context_parallel_exchange``); the queries attend to
one rank's at a time (``context_parallel_blocks``), so that a rank never holds more scores than one
fused kernel or one tile does, and under a causal mask no block needs a mask:

* the own shard: both chunks are in order of position, so it is plain causal attention;
* the shard of a rank before: its first chunk is before all queries, its second after all of them;
* the shard of a rank behind: both chunks are before the queries of the second chunk, and after
  those of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.errors import ConfigError
from mt_megatron.layers.attention.context_parallel_blocks import Merged, Scores, block_backward, block_forward
from mt_megatron.layers.attention.context_parallel_exchange import EXCHANGES
from mt_megatron.parallel.context_parallel import chunks, positions

_DEFAULT = "all_gather"


@dataclass(frozen=True, kw_only=True)
class Attending:
    """How one layer attends, apart from masks."""

    scale: float
    """Factor of the products of queries and keys."""

    causal: bool
    """Whether a token sees those before it and itself alone."""

    window: tuple[int | None, int | None]
    """How many tokens to the left and to the right are seen; None: all."""

    dropout: float
    """Probability with which an attention weight is dropped."""

    exchange: str
    """Key of ``EXCHANGES``."""


def exchange_of(config: Any) -> str:
    """What ``config.cp_comm_type`` (a field of later Megatron-Core) names; ``all_gather`` when there
    is none. Raises ConfigError for what is not in ``EXCHANGES``."""
    name = getattr(config, "cp_comm_type", None) or _DEFAULT
    if not isinstance(name, str) or name not in EXCHANGES:
        raise ConfigError(
            f"cp_comm_type is {name!r}; expected one of {', '.join(EXCHANGES)}, the same for all layers"
        )
    return name


@contextmanager
def random_numbers_of(rank: int, device: torch.device) -> Iterator[None]:
    """Random numbers on ``device`` that differ between ranks with other heads (by Megatron's RNG
    tracker) and, by ``rank``, between ranks with other queries.

    The tracker has no state for the latter: a checkpoint of Megatron-LM's keeps one context rank's
    states for all. So that is all this takes, one number of the state that they share.
    """
    host = device.type == "cpu"
    devices = [] if host else [device.index or 0]
    with tensor_parallel.get_cuda_rng_tracker().fork():
        seed = int(torch.randint(2**62, (), device=device))
        with torch.random.fork_rng(devices, device_type="cuda" if host else device.type):
            generator = torch.default_generator if host else torch.get_device_module(device)
            generator.manual_seed(seed + rank)
            yield


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forbidden: Tensor | None,
    how: Attending,
    group: dist.ProcessGroup,
) -> Tensor:
    """[n, b, heads, d] attends to [n, b, groups, d] of all ranks; returns [n, b, heads, d].

    n is the number of tokens of this rank. ``forbidden`` is bool and broadcasts to [b, heads, n,
    n * ranks]: this rank's queries in the order it holds them, all keys by position. Every rank of
    ``group`` must call it, and its backward pass.
    """
    if forbidden is not None:
        forbidden = forbidden[(None,) * (4 - forbidden.dim())]
    output: Tensor = _Attention.apply(query, key, value, forbidden, how, group)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        forbidden: Tensor | None,
        how: Attending,
        group: dist.ProcessGroup,
    ) -> Tensor:
        with _autocast_off(query):
            q, own = _heads_first(query), torch.stack((key, value))
            merged, kept = Merged(q, value.size(-1)), []
            for source, shard in EXCHANGES[how.exchange].shards(own, group):
                rows, keys, scores = _block(how, group, source, q, forbidden)
                k, v = (_heads_first(each)[:, :, keys] for each in shard)
                output, lse, again = block_forward(q[:, :, rows], k, v, scores)
                merged.add(rows, output, lse)
                kept.append(again)
            result = _tokens_first(merged.output).to(query.dtype).contiguous()
        ctx.save_for_backward(
            query, own, forbidden, result, merged.lse, *(each for block in kept for each in block)
        )
        ctx.how, ctx.group, ctx.kept = how, group, [len(block) for block in kept]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, own, forbidden, result, lse, *every = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)
        with _autocast_off(query):
            q, output = _heads_first(query), _heads_first(result)
            # Kernels want the last dimension dense, and a sum's gradient is one number seen often.
            grad = _heads_first(grad_output.contiguous())
            grad_q = torch.zeros_like(q, dtype=wide)
            left, counts = iter(every), iter(ctx.kept)

            def of(source: int, shard: Tensor) -> Tensor:
                rows, keys, scores = _block(ctx.how, ctx.group, source, q, forbidden)
                k, v = (_heads_first(each)[:, :, keys] for each in shard)
                kept = tuple(next(left) for _ in range(next(counts)))
                dq, dk, dv = block_backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    k,
                    v,
                    output[:, :, rows],
                    lse[:, :, rows],
                    scores,
                    kept,
                )
                grad_q[:, :, rows] += dq
                gradient = torch.zeros_like(shard, dtype=wide)
                gradient[0, keys], gradient[1, keys] = _tokens_first(dk), _tokens_first(dv)
                return gradient

            grad_k, grad_v = EXCHANGES[ctx.how.exchange].gradient(own, ctx.group, of).to(query.dtype)
            grad_query = _tokens_first(grad_q).to(query.dtype)
        return grad_query, grad_k, grad_v, None, None, None


def _block(
    how: Attending, group: dist.ProcessGroup, source: int, q: Tensor, forbidden: Tensor | None
) -> tuple[slice, slice, Scores]:
    """Which of this rank's queries attend to which keys of rank ``source``, and how."""
    rank, size, length = dist.get_rank(group), dist.get_world_size(group), q.size(2)
    half, rows, keys = length // 2, slice(0, length), slice(0, length)
    if how.causal and source < rank:
        keys = slice(0, half)
    elif how.causal and source > rank:
        rows = slice(half, length)
    outside = [_cut(mask, rows, keys) for mask in _outside(how, rank, source, size, q, forbidden)]
    scores = Scores(
        scale=how.scale,
        causal=how.causal and source == rank,
        forbidden=reduce(torch.logical_or, outside) if outside else None,
        dropout=how.dropout,
    )
    return rows, keys, scores


def _outside(
    how: Attending, rank: int, source: int, size: int, q: Tensor, forbidden: Tensor | None
) -> Iterator[Tensor]:
    """Masks, True where forbidden, over all of this rank's queries and the keys of ``source``."""
    left, right = how.window
    length = q.size(2)
    if forbidden is not None:
        half = length // 2
        columns = [forbidden[..., chunk * half : (chunk + 1) * half] for chunk in chunks(source, size)]
        yield forbidden if forbidden.size(-1) == 1 else torch.cat(columns, -1)
    if left is not None or (right is not None and not how.causal):
        own, others = (positions(each, size, length, q.device) for each in (rank, source))
        distance = others - own[:, None]
        if left is not None:
            yield distance < -left
        if right is not None:
            yield distance > right


def _cut(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    if mask.size(-1) > 1:
        mask = mask[..., keys]
    return mask[..., rows, :] if mask.size(-2) > 1 else mask


def _heads_first(tokens: Tensor) -> Tensor:
    return tokens.permute(1, 2, 0, 3)


def _tokens_first(heads: Tensor) -> Tensor:
    return heads.permute(2, 0, 1, 3)


def _autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
