"""Attention over a sequence whose tokens are spread over a context-parallel group.

Each rank has the queries, keys and values of its two chunks (``parallel.context_parallel``). Keys and
values come from the other ranks, un-expanded (``EXCHANGES``); the queries attend to one rank's at a time
(``block_forward``), so that a rank never holds more scores than one fused kernel or one tile does, and
under a causal mask no block needs a mask:

* the own shard: both chunks are in order of position, so it is plain causal attention;
* the shard of a rank before: its first chunk is before all queries, its second after all of them;
* the shard of a rank behind: both chunks are before the queries of the second chunk, and after
  those of the first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.errors import ConfigError
from mt_megatron.parallel.context_parallel import chunks, positions
from mt_megatron.seams import collectives, events
from mt_megatron.seams.taps.attention import keys_arrived

logger = logging.getLogger("mt_megatron")

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
                keys_arrived(source, shard[0])
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


# Attention of a block of queries to a block of keys, with its merge: blockwise softmax (arXiv:2205.14135,
# section 3; arXiv:2310.01889). Attending to two sets of keys gives two outputs, each normalised by its own
# sum of exponentials; the logarithms of these sums say how to weigh them. The backward pass of a block
# needs only the merged output and the merged logarithm. All tensors are [batch, heads, tokens, head size];
# keys and values may have fewer heads, each shared by as many consecutive query heads.

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


# Exchange of keys and values between the ranks of a context-parallel group, and of their gradients.
#
# ``all_gather``: one collective brings all shards, one reduce-scatter sends the gradients home. The gathered
# shards live only as long as the call: the backward pass gathers them again.
#
# ``p2p``: shards travel round a ring (arXiv:2310.01889) while the current shard is computed, and in the
# backward pass the sums of their gradients follow them. A rank holds two shards at a time.
#
# A shard is [2, tokens of a rank, batch, groups, head size]: keys, then values.

# torch renamed these twice; the newest name is the one that does not warn.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Gradient = Callable[[int, Tensor], Tensor]
"""Rank and shard -> gradient of that shard, in the dtype it is to be summed in."""


class Exchange(Protocol):
    """What ``EXCHANGES`` holds. Every rank of the group must make the same calls in the same order."""

    def shards(self, own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
        """Every rank of ``group`` and its shard, the own one first, then those of the ranks before."""

    def gradient(self, own: Tensor, group: dist.ProcessGroup, of: Gradient) -> Tensor:
        """The sum over ``group`` of what each rank's ``of`` gives for the own shard; asked for in the
        order of ``shards``."""


class AllGather:
    """One all-gather forward; one all-gather and one reduce-scatter backward."""

    def shards(self, own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        gathered = own.new_empty(size * own.size(0), *own.shape[1:])
        with collectives.announced("all_gather", "cp", group, own):
            _all_gather(gathered, own, group=group)
        for step in range(size):
            source = (rank - step) % size
            yield source, gathered.unflatten(0, (size, -1))[source]

    def gradient(self, own: Tensor, group: dist.ProcessGroup, of: Gradient) -> Tensor:
        total: Tensor | None = None
        for source, shard in self.shards(own, group):
            part = of(source, shard)
            if total is None:
                total = part.new_empty(dist.get_world_size(group), *own.shape)
            total[source] = part
        assert total is not None
        mine = total.new_empty(own.shape)
        with collectives.announced("reduce_scatter", "cp", group, total):
            _reduce_scatter(mine, total.flatten(0, 1), group=group)
        return mine


class Ring:
    """Point-to-point transfers to the next rank of the group that overlap with the work."""

    def shards(self, own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for step in range(size):
            transfer = _Transfer(own, group) if step < size - 1 else None
            yield (rank - step) % size, own
            if transfer is not None:
                own = transfer.received()

    def gradient(self, own: Tensor, group: dist.ProcessGroup, of: Gradient) -> Tensor:
        sums: _Transfer | None = None
        for source, shard in self.shards(own, group):
            part = of(source, shard)
            if sums is not None:
                part += sums.received()
            # The next rank has this shard next; after the last step the sum arrives where it belongs.
            sums = _Transfer(part, group)
        assert sums is not None
        return sums.received()


class _Transfer:
    """A tensor on its way to the next rank of the ring, and one of its shape from the rank before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        # Both are kept until the transfer is over.
        self._sent, self._received = tensor, torch.empty_like(tensor)
        following = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self._attrs: dict[str, Any] | None = None
        if events.listening():
            self._attrs = collectives.described("ring", "cp", group, collectives.size_of(tensor))
            self._attrs["peer"] = before
        with collectives.part(self._attrs, "start"):
            self._works: list[Any] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._sent, following, group),
                    dist.P2POp(dist.irecv, self._received, before, group),
                ]
            )

    def received(self) -> Tensor:
        with collectives.part(self._attrs, "wait"):
            for work in self._works:
                work.wait()
        return self._received


EXCHANGES: dict[str, Exchange] = {"all_gather": AllGather(), "p2p": Ring()}
"""By Megatron-Core's later name for the choice, ``cp_comm_type``."""
