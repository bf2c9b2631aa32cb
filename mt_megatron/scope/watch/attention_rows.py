"""Rows of attention computed again from captured queries and keys: a few queries against all keys.

Works whatever kernel the model attends with. Under context parallelism the other ranks' keys are those that
pass through this rank's own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mt_megatron.parallel.context_parallel import positions
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.scalars import ATTENTION
from mt_megatron.seams import taps
from mt_megatron.seams.taps import AttentionInputs, Watch

MOST_WAITING = 2**22
"""Logits that wait for those of other calls, float32."""

Wanted = Callable[[AttentionInputs], "list[Rows]"]
"""Which rows of a call are asked for."""

Found = Callable[[AttentionInputs, "Rows", Tensor], None]
"""Gets the logits [samples, heads, rows, keys] in float32: scaled, minus infinity where attending is
forbidden, keys in the order of the whole sequence (of the packed one, for packed documents)."""


_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one call that are asked for."""

    places: Tensor
    """int64 [rows], on the device: rows of this rank's queries."""

    samples: slice = field(default_factory=lambda: slice(None))
    """Sequences of the micro-batch."""

    heads: slice = field(default_factory=lambda: slice(None))
    """Of this rank's query heads."""

    forbidden: dict[Any, Tensor] | None = field(default=None, compare=False, repr=False)
    """Results of ``masked`` for calls of one form, where one object serves many calls: rows that are asked
    for once would keep masks of all tokens by all tokens."""


def watch_rows(
    module: nn.Module, wanted: Wanted, found: Found, *, told: Callable[[str], None]
) -> list[Watch]:
    """Call ``found`` for the ``wanted`` rows of every call of the core attention of ``module``."""
    if int(getattr(_config(module), "context_parallel_size", 1)) == 1:

        def whole(inputs: AttentionInputs) -> None:
            for rows in wanted(inputs):
                key = inputs.key if inputs.key.dim() == 4 else inputs.key.unsqueeze(1)
                found(inputs, rows, masked(inputs, rows, products(inputs, rows, key)))

        return [taps.attention_inputs(module, whole, live=True, told=told)]
    open_: list[_OverContext] = []

    def begin(inputs: AttentionInputs) -> None:
        open_[:] = [_OverContext(inputs, wanted(inputs))]

    def shard(source: int, keys: Tensor) -> None:
        if open_ and open_[0].add(source, keys):
            open_.pop().give(found)

    # Detached: the query is kept until all keys have come.
    return [taps.attention_inputs(module, begin, told=told), taps.key_shards(module, shard, told=told)]


class _OverContext:
    """One call whose keys arrive rank by rank."""

    def __init__(self, inputs: AttentionInputs, wanted: list[Rows]) -> None:
        self._inputs = inputs
        self._wanted = wanted
        self._logits: list[list[Tensor]] = [[] for _ in wanted]
        self._places: list[Tensor] = []

    def add(self, source: int, keys: Tensor) -> bool:
        """Whether these were the last keys."""
        size = self._inputs.context_size
        self._places.append(positions(source, size, keys.size(0), keys.device))
        for rows, logits in zip(self._wanted, self._logits, strict=True):
            with torch.no_grad():
                logits.append(products(self._inputs, rows, keys))
        return len(self._places) == size

    def give(self, found: Found) -> None:
        places = torch.cat(self._places)
        order = places.argsort()
        for rows, logits in zip(self._wanted, self._logits, strict=True):
            joined = torch.cat(logits, dim=-1)[..., order]
            found(self._inputs, rows, masked(self._inputs, rows, joined, places[order]))


def products(inputs: AttentionInputs, rows: Rows, key: Tensor) -> Tensor:
    """Scaled products of queries and ``key`` [n, b, groups, d], float32 [samples, heads, rows, n]."""
    query = inputs.query if inputs.query.dim() == 4 else inputs.query.unsqueeze(1)
    heads, groups = query.size(2), key.size(2)
    share = heads // groups
    asked, keys = query.permute(1, 2, 0, 3), key.permute(1, 2, 3, 0)
    begin, end, first, last = 0, heads, *rows.heads.indices(heads)[:2]
    if (first, last) != (0, heads):
        # Keys of the asked heads' groups alone, in the kernels' order: consecutive heads share a group.
        low, high = first // share, -(-last // share)
        begin, end = low * share, high * share
        if high - low == 1:
            begin, end = first, last
        asked, keys = asked[:, begin:end], keys[:, low:high]
    if rows.samples != _ALL:
        asked, keys = asked[rows.samples], keys[rows.samples]
    if keys.size(2) != asked.size(3):
        keys = keys[:, :, : asked.size(3)]
    asked = asked.index_select(2, _on(rows.places, query.device)).float()
    batch, groups, size, count = keys.shape
    # A group's heads are rows of one product, so that no keys are repeated.
    found = torch.baddbmm(
        asked.new_empty(1, 1, 1),
        asked.reshape(batch * groups, -1, size),
        keys.float().reshape(batch * groups, size, count),
        beta=0.0,
        alpha=inputs.scale,
    )
    found = found.view(batch, end - begin, -1, count)
    return found if (first, last) == (begin, end) else found[:, first - begin : last - begin]


def _on(values: Tensor, device: torch.device) -> Tensor:
    return values if values.device == device else values.to(device)


def masked(inputs: AttentionInputs, rows: Rows, logits: Tensor, key_places: Tensor | None = None) -> Tensor:
    """``logits``, changed to minus infinity where attending is forbidden; ``key_places`` int64 [keys], rising
    (None: 0, 1, 2 ...)."""
    device = logits.device
    form = (inputs.query.size(0), logits.size(-1), inputs.mask_kind, inputs.window, device)
    kept = rows.forbidden if key_places is None and inputs.cu_seqlens is None else None
    forbidden = None if kept is None else kept.get(form)
    local = _on(rows.places, device)
    if forbidden is None:
        ordered = torch.arange(logits.size(-1), device=device) if key_places is None else key_places
        places, forbidden = _forbidden(inputs, local, ordered)
        if kept is not None:
            kept[form] = forbidden
    found = logits.masked_fill_(forbidden, -torch.inf)
    batch = inputs.query.size(1) if inputs.query.dim() == 4 else 1
    if inputs.cu_seqlens is not None:
        found.masked_fill_(_other_documents(inputs, rows, places, ordered, batch), -torch.inf)
    if inputs.mask is not None:
        mask = inputs.mask
        mask = mask[(None,) * (4 - mask.dim())].expand(batch, -1, -1, -1)[rows.samples]
        if mask.size(1) > 1:
            mask = mask[:, rows.heads]
        if mask.size(2) > 1:
            mask = mask[:, :, local]
        found.masked_fill_(mask, -torch.inf)
    return found


def _forbidden(inputs: AttentionInputs, local: Tensor, key_places: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the queries ``local``, int64 [rows], and what the kind of mask and the window forbid, bool
    [rows, keys]."""
    queries, device = inputs.query.size(0), local.device
    own = torch.arange(queries, device=device)
    if inputs.context_size > 1:
        own = positions(inputs.context_rank, inputs.context_size, queries, device)
    elif key_places.numel() > queries:
        # With a cache of keys the last query is aligned with the last key.
        own = own + (key_places.numel() - queries)
    places = own[local]
    distance = key_places - places[:, None]
    forbidden = torch.zeros_like(distance, dtype=torch.bool)
    if inputs.mask_kind in ("causal", "padding_causal"):
        forbidden |= distance > 0
    if inputs.window is not None:
        left, right = inputs.window
        if left >= 0:
            forbidden |= distance < -left
        if right >= 0:
            forbidden |= distance > right
    return places, forbidden


def _other_documents(
    inputs: AttentionInputs, rows: Rows, places: Tensor, key_places: Tensor, batch: int
) -> Tensor:
    """bool [samples, 1, rows, keys]: whether a key is of another document than the query."""
    assert inputs.cu_seqlens is not None
    borders = inputs.cu_seqlens.to(places.device).long()
    length = key_places.numel()
    firsts = torch.arange(batch, device=places.device)[rows.samples, None] * length
    # Borders are in the micro-batch read row by row.
    queries = torch.searchsorted(borders, firsts + places, right=True)
    keys = torch.searchsorted(borders, firsts + key_places, right=True)
    return queries[:, None, :, None] != keys[:, None, None, :]


def row_statistics(logits: Tensor) -> tuple[Tensor, Tensor, int]:
    """Largest logit [], sum of the rows' entropies [] in nats, and the number of rows, of ``logits`` [...,
    keys]. A row that may attend to nothing has entropy 0."""
    largest = logits.amax(dim=-1)
    entropies = torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1)
    return largest.amax(), entropies.masked_fill(largest == -torch.inf, 0.0).sum(), largest.numel()


class RowScalars:
    """``row_statistics`` for ``Parts.later``. Logits of one form wait for each other: few kernels serve many
    calls then. Where that fails ``told`` gets a line, and no rows of the step are looked at any more."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._waiting: list[tuple[str, Tensor]] = []
        self._has_failed = False

    def add(self, parts: Parts, path: str, logits: Tensor, *, all_attend: bool) -> None:
        """Take the logits of a call, which are this one's from here on; ``all_attend``: every row is known
        to attend to something."""
        if self._has_failed:
            return
        if not all_attend:
            largest, entropies, count = row_statistics(logits)
            parts.later(ATTENTION, (path,), [largest, entropies], [float(count)])
            return
        if self._waiting and self._waiting[0][1].shape != logits.shape:
            self.give(parts)
        self._waiting.append((path, logits))
        if len(self._waiting) * logits.numel() >= MOST_WAITING:
            self.give(parts)

    def give(self, parts: Parts) -> None:
        """Give what waits to ``parts``."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self._has_failed:
            return
        try:
            logits = torch.stack([each for _, each in waiting])
            largest = logits.flatten(1).amax(dim=1).unbind()
            probabilities = torch.softmax(logits, dim=-1)
            entropies = torch.special.entr(probabilities, out=probabilities).flatten(1).sum(dim=1).unbind()
        except Exception as error:  # noqa: BLE001 - the rows are of several layers, and all else is recorded
            self._has_failed = True
            parts.leave_out(ATTENTION)
            self._told(f"{type(error).__name__}: {error}")
            return
        count = float(waiting[0][1][..., 0].numel())
        for (path, _), *found in zip(waiting, largest, entropies, strict=True):
            parts.later(ATTENTION, (path,), found, [count])


def _config(module: nn.Module) -> object:
    return taps.attention.core_attention(module).config
