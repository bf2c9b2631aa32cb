"""Packed documents of a sequence: borders, positions, mask and attention.

Borders are Megatron's ``cu_seqlens``: int32 [documents + 1], from 0 to the number of tokens of the
micro-batch [b, s] read row by row. Every row begins a document, so that none crosses rows. They
stay on the host: how long documents are decides which kernels are launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mt_megatron.errors import ConfigError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""[sq, b, heads, d], [sk, b, groups, d], [sk, b, groups, dv] -> [sq, b, heads * dv]."""


def document_borders(tokens: Tensor, end: int) -> Tensor:
    """``cu_seqlens`` of ``tokens`` [b, s]: documents end after each ``end`` and with each row."""
    starts = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    starts[:, 1:] = tokens[:, :-1] == end
    starts[:, 0] = True
    found = starts.flatten().nonzero().flatten()
    return torch.cat((found, found.new_tensor([tokens.numel()]))).to(torch.int32)


def document_positions(borders: Tensor, batch_size: int) -> Tensor:
    """int64 [b, s]: how far each token is from the beginning of its document."""
    starts, lengths = borders[:-1].long(), borders.diff().long()
    positions = torch.arange(int(borders[-1])) - torch.repeat_interleave(starts, lengths)
    return positions.view(batch_size, -1)


def document_mask(borders: Tensor, batch_size: int, device: torch.device) -> Tensor:
    """bool [b, 1, s, s], True where attending is forbidden: to later tokens and to other documents."""
    lengths = borders.diff().long()
    number = torch.repeat_interleave(torch.arange(len(lengths)), lengths).view(batch_size, 1, -1).to(device)
    future = torch.ones(number.size(-1), number.size(-1), dtype=torch.bool, device=device).triu(1)
    return ((number.unsqueeze(-1) != number.unsqueeze(-2)) | future).contiguous()


def are_borders(mask: Tensor | None) -> bool:
    """Whether what came in the place of an attention mask is ``cu_seqlens``; masks are bool."""
    return mask is not None and mask.dtype is torch.int32 and mask.dim() == 1


def attend_by_document(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, attend: Attend) -> Tensor:
    """Each document of [s, b, heads, d] by itself; returns [s, b, heads * dv].

    Raises ``ConfigError`` when the borders are not those of s x b tokens.
    """
    length, batch = query.shape[:2]
    lengths = _lengths(borders, length * batch)
    if lengths == [length] * batch:
        return attend(query, key, value)
    rows = [t.transpose(0, 1).reshape(length * batch, 1, *t.shape[2:]) for t in (query, key, value)]
    context = _each(rows[0], rows[1], rows[2], lengths, lengths, attend)
    return context.view(batch, length, -1).transpose(0, 1).contiguous()


def attend_packed(query: Tensor, key: Tensor, value: Tensor, packed: Any, attend: Attend) -> Tensor:
    """Each document of [t, heads, d] by itself, as Megatron's ``PackedSeqParams`` says; returns
    [t, heads * dv].

    Raises ``ConfigError`` for another layout than ``thd`` and for borders that do not fit.
    """
    if packed.qkv_format not in (None, "thd") or query.dim() != 3:
        raise ConfigError(
            f"found packed sequences of format {packed.qkv_format} and shape {tuple(query.shape)}; expected "
            "thd, [tokens, heads, head size], which is a micro-batch of one row"
        )
    queries = _lengths(packed.cu_seqlens_q, query.size(0))
    keys = _lengths(packed.cu_seqlens_kv, key.size(0))
    if len(queries) != len(keys):
        raise ConfigError(
            f"found {len(queries)} documents of queries and {len(keys)} of keys; expected the same number in "
            "cu_seqlens_q and cu_seqlens_kv"
        )
    rows = [t.unsqueeze(1) for t in (query, key, value)]
    return _each(rows[0], rows[1], rows[2], queries, keys, attend).squeeze(1)


@contextmanager
def positions_restart(rotary: torch.nn.Module | None, positions: Tensor | None) -> Iterator[None]:
    """Meanwhile ``rotary`` (Megatron's ``RotaryEmbedding``) gives the angles of ``positions`` [b, s],
    as [s, b, 1, d], instead of those of 0, 1, 2 ... Nothing happens when either is None."""
    if rotary is None or positions is None:
        yield
        return
    wanted = positions.t()

    def gather(module: torch.nn.Module, args: Any, angles: Tensor) -> Tensor:
        return angles[:, 0, 0][wanted.to(angles.device)].unsqueeze(2)

    handle = rotary.register_forward_hook(gather)
    try:
        yield
    finally:
        handle.remove()


def _each(
    query: Tensor, key: Tensor, value: Tensor, queries: list[int], keys: list[int], attend: Attend
) -> Tensor:
    # One split each, not slices: the gradient of a slice is as large as the whole.
    parts = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    return torch.cat([attend(q, k, v) for q, k, v in parts])


# All layers get the same borders; on an accelerator reading them waits for the device.
_read: Any = WeakIdKeyDictionary()


def _lengths(borders: Tensor, tokens: int) -> list[int]:
    known = _read.get(borders)
    version = None if borders.is_inference() else borders._version
    if version is None or known is None or known[0] != version:
        known = (version, _differences(borders.tolist()))
        _read[borders] = known
    lengths: list[int] = known[1]
    if sum(lengths) != tokens or min(lengths, default=0) < 0:
        raise ConfigError(
            f"found document borders (cu_seqlens) that end at {sum(lengths)} for {tokens} tokens; expected "
            "them to rise from 0 to the number of tokens of the micro-batch"
        )
    return lengths


def _differences(borders: Sequence[int]) -> list[int]:
    if not borders or borders[0] != 0:
        raise ConfigError(
            f"found document borders (cu_seqlens) {list(borders[:3])} ...; expected the first to be 0"
        )
    return [after - before for before, after in zip(borders, borders[1:], strict=False)]
