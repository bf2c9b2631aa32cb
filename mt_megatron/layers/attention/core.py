"""Core attention for Megatron's layer specs on torch's ``scaled_dot_product_attention``.

Takes the place of ``megatron.core.transformer.dot_product_attention.DotProductAttention``, which
builds the whole s x s score matrix and refuses sliding windows and context parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from mt_megatron.errors import ConfigError
from mt_megatron.layers.attention.context_parallel import Attending, attend, exchange_of, random_numbers_of
from mt_megatron.layers.attention.packed_sequences import are_borders, attend_by_document, attend_packed
from mt_megatron.parallel.context_parallel import positions
from mt_megatron.seams import widened

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_HALF = (torch.float16, torch.bfloat16)


class DotProductAttention(MegatronModule):  # type: ignore[misc]
    """``softmax(q k^T * scale) v`` with grouped queries, masks, sliding windows and dropout.

    ``scale`` is ``1 / sqrt(kv_channels)`` unless ``softmax_scale`` is given. The kernels keep their
    scores and softmax in fp32, so ``apply_query_key_layer_scaling`` (which divides by the layer's
    number before the softmax and multiplies after, for fp16's sake) changes nothing and
    ``attention_softmax_in_fp32`` always holds. A row that may attend to nothing gives zeros.

    With ``config.context_parallel_size`` above 1 each rank holds two chunks of the sequence (see
    ``parallel.context_parallel``) and the others' keys and values come as ``config.cp_comm_type``
    says, if there is such a field: ``all_gather`` (also when it is None) or ``p2p``, a ring.

    Raises ConfigError for context parallelism of cross attention or of another size than that of
    Megatron's process groups.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__(config=config)
        self.exchange = _context_exchange(config, attention_type)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.attention_dropout = torch.nn.Dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )

    def _get_name(self) -> str:
        # What is shown, as by print(model): Megatron has a class of the same name.
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[sq, b, heads, d] attends to [sk, b, groups, d]; returns [sq, b, heads * d_value].

        ``attention_mask`` is bool, True where attending is forbidden, and broadcasts to
        [b, heads, sq, sk]. It holds in addition to causality when ``attn_mask_type`` (by default
        the layer's) is causal; None is the fast way to say causal and nothing else. With more keys
        than queries (a key-value cache) the last query is aligned with the last key.

        Under context parallelism sq = sk is what this rank holds; a mask has this rank's rows, in
        the order it holds them, and the columns of the whole sequence in its own order.

        Documents that lie one after another attend each to itself alone, in a call of the kernel
        for each of them: with ``cu_seqlens`` (int32 [documents + 1], see ``packed_sequences``) in the place
        of the mask, or with Megatron's ``packed_seq_params`` and [tokens, heads, d]; then the
        result is [tokens, heads * d_value].
        """
        kind = attn_mask_type or self.attn_mask_type
        if packed_seq_params is not None or are_borders(attention_mask):
            return self._documents(query, key, value, attention_mask, kind, packed_seq_params)
        if self.exchange is not None:
            return self._over_context_ranks(query, key, value, attention_mask, kind, self.exchange)
        return self._whole(query, key, value, attention_mask, kind)

    def _documents(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: AttnMaskType, packed: Any
    ) -> Tensor:
        if self.exchange is not None:
            raise ConfigError(
                "packed sequences reached an attention over context_parallel_size "
                f"{self.config.context_parallel_size}, which cannot separate them: a rank holds chunks of "
                "the sequence, not documents; pass an attention mask, or set context_parallel_size=1"
            )

        def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._whole(q, k, v, None, kind)

        if packed is None:
            assert mask is not None
            return attend_by_document(query, key, value, mask, alone)
        if mask is not None:
            raise ConfigError(
                "packed_seq_params and an attention mask were given; expected one of the two. Pass "
                "attention_mask=None"
            )
        return attend_packed(query, key, value, packed, alone)

    def _whole(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, kind: AttnMaskType
    ) -> Tensor:
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        causal, allowed = self._allowed(attention_mask, kind, query, key)
        dropout = self.attention_dropout.p if self.training else 0.0
        if causal and suits(query, key, value, dropout):
            return causal_attention(query, key, value, self.softmax_scale)
        grouped = query.size(1) != key.size(1)
        if grouped and query.device.type != "cpu" and (allowed is not None or query.dtype not in _HALF):
            # Of accelerators' kernels without an s x s matrix only those of two bytes take grouped heads, and
            # these no mask.
            repeats = query.size(1) // key.size(1)
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
            grouped = False
        # The kernels without an s x s matrix want one head size; zeros change neither scores nor sums.
        value_size = value.size(-1)
        query, key, value = _padded_to_one_size(query, key, value)
        attend = partial(
            F.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask=allowed,
            dropout_p=dropout,
            is_causal=causal,
            scale=self.softmax_scale,
            enable_gqa=grouped,
        )
        if dropout:
            # Ranks that share a layer hold different heads and must drop different scores.
            with tensor_parallel.get_cuda_rng_tracker().fork():
                context = attend()
        else:
            context = attend()
        return context[..., :value_size].permute(2, 0, 1, 3).flatten(2).contiguous()

    def _over_context_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        forbidden: Tensor | None,
        kind: AttnMaskType,
        exchange: str,
    ) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        held, keys = query.size(0), query.size(0) * group.size()
        causal = kind in _CAUSAL
        if key.size(0) != held or (kind is AttnMaskType.no_mask and self.attn_mask_type in _CAUSAL):
            raise ConfigError(
                "a key-value cache reached an attention over context_parallel_size "
                f"{self.config.context_parallel_size}: each rank has only its own part of the sequence; "
                "generate with context_parallel_size=1"
            )
        if held % 2:
            raise ConfigError(
                f"found {held} tokens on this rank; expected an even number, two chunks of the sequence. "
                f"Change the sequence length to a multiple of 2 x {group.size()}"
            )
        if forbidden is not None:
            _check_mask(forbidden, (query.size(1), query.size(2), held, keys))
            if causal and _is_exactly_causal(forbidden, (group.rank(), group.size(), held)):
                forbidden = None
        if torch.is_autocast_enabled(query.device.type):
            low = torch.get_autocast_dtype(query.device.type)
            query, key, value = (t.to(low) for t in (query, key, value))
        how = Attending(
            scale=self.softmax_scale,
            causal=causal,
            window=_window(self.config.window_size, keys),
            dropout=self.attention_dropout.p if self.training else 0.0,
            exchange=exchange,
        )
        value_size = value.size(-1)
        query, key, value = _padded_to_one_size(query, key, value)
        with random_numbers_of(group.rank(), query.device) if how.dropout else nullcontext():
            context = attend(query, key, value, forbidden, how, group)
        return context[..., :value_size].flatten(2).contiguous()

    def _allowed(
        self, forbidden: Tensor | None, kind: AttnMaskType, query: Tensor, key: Tensor
    ) -> tuple[bool, Tensor | None]:
        """What torch wants to know: causal and nothing else, or a mask that is True where allowed."""
        (batch, heads, sq, _), sk = query.shape, key.size(2)
        causal = kind in _CAUSAL
        if kind is AttnMaskType.no_mask and self.attn_mask_type in _CAUSAL and sq < sk:
            # Megatron's key-value cache says no_mask after the prompt, assuming one query a step.
            causal = True
        if causal and sq > sk:
            raise ConfigError(
                f"causal attention of {sq} queries to {sk} keys: the first queries would see nothing"
            )
        left, right = _window(self.config.window_size, sk)
        if causal:
            right = 0
        if forbidden is not None:
            _check_mask(forbidden, (batch, heads, sq, sk))
            if left is None and right == 0 and sq == sk and _is_exactly_causal(forbidden, (0, 1, sq)):
                forbidden = None
        # One query is the last one: causality forbids it nothing.
        structural = left is not None or (right is not None and sq > 1)
        if forbidden is None and structural and left is None and right == 0 and sq == sk:
            return True, None
        band = _outside_band(sq, sk, left, right, query.device) if structural else None
        both = [mask for mask in (forbidden, band) if mask is not None]
        return False, ~reduce(torch.logical_or, both) if both else None


def _context_exchange(config: Any, attention_type: str) -> str | None:
    """How keys and values travel; None without context parallelism."""
    size, group = config.context_parallel_size, parallel_state.get_context_parallel_group(False)
    joined = 1 if group is None else group.size()
    if size != joined and not (group is None and size == 1):
        raise ConfigError(
            f"context_parallel_size is {size} and Megatron's context parallel groups have {joined} rank(s); "
            "give the same size to TransformerConfig and to initialize_model_parallel"
        )
    if size == 1:
        return None
    if attention_type != "self":
        raise ConfigError(
            f"context_parallel_size is {size} with {attention_type} attention; expected self attention, "
            "whose queries and keys are the same tokens. Set context_parallel_size=1"
        )
    return exchange_of(config)


def _padded_to_one_size(*tensors: Tensor) -> list[Tensor]:
    size = max(t.size(-1) for t in tensors)
    return [t if t.size(-1) == size else F.pad(t, (0, size - t.size(-1))) for t in tensors]


def _check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    fits = mask.dim() <= 4 and all(
        m in (1, s) for m, s in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if mask.dtype is not torch.bool or not fits:
        raise ConfigError(
            f"found an attention mask of {mask.dtype} and shape {tuple(mask.shape)}; expected torch.bool, "
            f"True where attending is forbidden, broadcastable to {shape} (batch, heads, queries, keys)"
        )


def _window(size: tuple[int, int] | None, keys: int) -> tuple[int | None, int | None]:
    """Keys visible to the left and right of a query's own position; None for all of them."""
    if size is None:
        return None, None
    left, right = (None if n < 0 or n >= keys - 1 else n for n in size)
    return left, right


_last_band: tuple[Any, Tensor] | None = None


def _outside_band(sq: int, sk: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    """[sq, sk], True outside the diagonal band whose last row ends at the last key."""
    global _last_band
    wanted = (sq, sk, left, right, device)
    # All layers of a micro-batch ask for the same one.
    if _last_band is not None and _last_band[0] == wanted:
        return _last_band[1]
    distance = torch.arange(sk, device=device) - torch.arange(sk - sq, sk, device=device)[:, None]
    outside = torch.zeros(sq, sk, dtype=torch.bool, device=device)
    if left is not None:
        outside |= distance < -left
    if right is not None:
        outside |= distance > right
    _last_band = (wanted, outside)
    return outside


# Mask -> (its version and place when it was looked at, the verdict). All layers get the same mask
# object, so it is compared once; on an accelerator each comparison waits for the device.
_verdicts: Any = WeakIdKeyDictionary()


def _is_exactly_causal(mask: Tensor, place: tuple[int, int, int]) -> bool:
    """Whether ``mask`` forbids the future and nothing else; ``place``: context rank, ranks, queries."""
    # Tensors made in inference mode count no versions, and may change without being noticed.
    version = None if mask.is_inference() else (mask._version, place)
    known = _verdicts.get(mask)
    if version is not None and known is not None and known[0] == version:
        return bool(known[1])
    rank, size, queries = place
    verdict = mask.dim() >= 2 and mask.size(-2) == queries > 1 and mask.size(-1) == queries * size
    if verdict:
        keys = torch.arange(mask.size(-1), device=mask.device)
        own = positions(rank, size, queries, mask.device) if size > 1 else keys
        verdict = bool((mask == (keys > own[:, None])).all())
    if version is not None:
        _verdicts[mask] = (version, verdict)
    return verdict


# Causal attention on a CPU from batched matrix products. torch's CPU kernel multiplies in small tiles
# outside of the matrix library: in bf16 it is no faster than in fp32. Here a few heads at a time and
# ``_QUERIES`` queries at a time, so that the scores stay in the caches and almost half of the square is
# never computed. As in torch's kernel, scores and their gradient are products accumulated and kept in fp32;
# weights are rounded to the values' dtype before they multiply values.

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
                    found = widened.bmm(weights, v[:, : rows.stop])
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
