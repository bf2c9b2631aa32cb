"""Losses of tokens, and logits out of the blocks of the fused cross-entropy, which never has all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from mt_megatron.seams.taps import progress
from mt_megatron.seams.taps.modules import Watch


@dataclass(frozen=True, kw_only=True)
class LossBlock:
    """The asked tokens of one block of the loss, n of them, with this rank's part of the vocabulary.

    Tensor parallel ranks hold other words of the same tokens. ``lse`` is over the whole vocabulary, summed by
    the loss itself, so that what is made of it here adds up over the ranks without communication.
    """

    microbatch: int
    chunk: int
    """As of ``Call``."""

    depth: int
    """0 for the model's own loss, k for that of prediction depth k; -1 where no schedule runs."""

    positions: Tensor
    """int64 [n], on the host: place in the sequence; under context parallelism among this rank's tokens."""

    samples: Tensor
    """int64 [n], on the host: number of the sequence within the micro-batch."""

    labels: Tensor
    """int64 [n]: ids of the whole vocabulary."""

    logits: Tensor
    """[n, words] in the output layer's dtype, of the ids from ``first`` on; without padding of the
    vocabulary. A copy, the callback's own."""

    first: int
    vocab_size: int
    """Words of the whole vocabulary, padding included where the loss does not know it as such."""

    lse: Tensor
    """float32 [n]: log of the sum of the exponentials of a token's logits, over the whole vocabulary."""

    losses: Tensor
    """float32 [n], nats; equal on all tensor parallel ranks."""

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Ids int64 [n, k] and log-probabilities float32 [n, k] of this rank's likeliest words, likeliest
        first; fewer than k where it has fewer. The k best of all ranks' are those of the vocabulary."""
        values, columns = self.logits.topk(min(k, self.logits.size(1)), dim=-1)
        return columns + self.first, values.float() - self.lse[:, None]

    def entropy_part(self) -> Tensor:
        """float32 [n], nats: this rank's summand of the entropy of each token's distribution."""
        logprobs = self.logits.float() - self.lse[:, None]
        # A probability of zero has no share, also where its logarithm is minus infinity.
        parts: Tensor = torch.special.entr(logprobs.exp())
        return parts.sum(dim=-1)


def loss_blocks(
    fn: Callable[[LossBlock], None],
    *,
    positions: Collection[int] | None = None,
    samples: Collection[int] | None = None,
    errors: Literal["close", "raise"] = "close",
    told: Callable[[str], None] | None = None,
) -> Watch:
    """Call ``fn`` with the asked tokens of every block of the blocked loss, once the block's losses are known
    and in the order of the blocks, until the returned tap is closed.

    ``positions`` and ``samples`` are host numbers (a ``range`` is best), None for all: a block without asked
    tokens costs nothing, one with them a copy of their logits. The blocked loss computes as without it.
    Where the loss is not blocked, the logits of a micro-batch are one block. Recomputed losses are left out.
    """
    made = _LossWatch("the loss", told, errors)
    made.fn, made.positions, made.samples = fn, positions, samples
    _add(made)
    made.on_close(progress.follow())
    made.on_close(lambda: _remove(made))
    return made


def token_losses(
    fn: Callable[[Tensor, Tensor], None],
    *,
    errors: Literal["close", "raise"] = "close",
    told: Callable[[str], None] | None = None,
) -> Watch:
    """Call ``fn(losses, mask)`` with the model's own loss of every token of a micro-batch, float32 [b, s] in
    nats, and how much each counts, float32 [b, s]; under context parallelism of this rank's tokens. Equal on
    all tensor parallel ranks."""
    global _token_watches
    made = _TokenWatch("the loss of tokens", told, errors)
    made.fn = fn
    with _changing:
        _token_watches = (*_token_watches, made)
    made.on_close(progress.follow())
    made.on_close(lambda: _remove_tokens(made))
    return made


class _TokenWatch(Watch):
    fn: Callable[[Tensor, Tensor], None]


_token_watches: tuple[_TokenWatch, ...] = ()


def _remove_tokens(watch: _TokenWatch) -> None:
    global _token_watches
    with _changing:
        _token_watches = tuple(each for each in _token_watches if each is not watch)


def tokens_lost(losses: Tensor, mask: Tensor) -> None:
    """For a model family: these are the ``losses`` of a micro-batch, and ``mask`` of the same shape."""
    for each in _token_watches:
        each.tell(each.fn, losses.detach(), mask)


class _LossWatch(Watch):
    fn: Callable[[LossBlock], None]
    positions: Collection[int] | None
    samples: Collection[int] | None

    def asked(self, length: int, batch: int) -> list[int]:
        """Rows of [length, batch] flattened, rising."""
        positions = range(length) if self.positions is None else sorted(set(self.positions))
        samples = range(batch) if self.samples is None else sorted(set(self.samples))
        return [
            position * batch + sample
            for position in positions
            if 0 <= position < length
            for sample in samples
            if 0 <= sample < batch
        ]


# Replaced, never changed in place.
_watches: tuple[_LossWatch, ...] = ()
_changing = Lock()


def _add(watch: _LossWatch) -> None:
    global _watches
    with _changing:
        _watches = (*_watches, watch)


def _remove(watch: _LossWatch) -> None:
    global _watches
    with _changing:
        _watches = tuple(each for each in _watches if each is not watch)


# What the loss calls.


class Asked:
    """Tokens that taps ask for in one loss of one micro-batch. The loss hands over each block twice: its
    logits, before they become a softmax, and its sums."""

    def __init__(
        self, watches: Sequence[_LossWatch], labels: Tensor, first: int, words: int, whole: int
    ) -> None:
        length, batch = labels.shape
        self._batch = batch
        self._labels = labels.reshape(-1)
        self._first, self._words, self._whole = first, words, whole
        self._depth = progress.ordinal(Asked, False)
        self._rows = [(each, each.asked(length, batch)) for each in watches]
        self._next = [0] * len(watches)

    def within(self, start: int, stop: int) -> Kept | None:
        """A keeper of the asked rows from ``start`` to ``stop``; None without any. Blocks come in order."""
        found: list[tuple[_LossWatch, list[int]]] = []
        for index, (watch, rows) in enumerate(self._rows):
            begin = end = self._next[index]
            while end < len(rows) and rows[end] < stop:
                end += 1
            self._next[index] = end
            if end > begin and not watch.closed:
                found.append((watch, rows[begin:end]))
        return Kept(self, found, start) if found else None

    def block(self, rows: list[int], logits: Tensor, lse: Tensor, losses: Tensor) -> LossBlock:
        """What is given of ``rows``."""
        at = torch.tensor(rows)
        return LossBlock(
            microbatch=progress.current_microbatch(),
            chunk=progress.current_chunk(),
            depth=self._depth,
            positions=at // self._batch,
            samples=at % self._batch,
            labels=self._labels[at.to(self._labels.device)],
            logits=logits[:, : self._words],
            first=self._first,
            vocab_size=self._whole,
            lse=lse,
            losses=losses,
        )


class Kept:
    """The asked rows of one block. What goes wrong closes the tap that asked, and the loss goes on."""

    def __init__(self, asked: Asked, found: list[tuple[_LossWatch, list[int]]], start: int) -> None:
        self._asked = asked
        self._rows = [_Rows(watch, rows, torch.tensor(rows) - start) for watch, rows in found]

    def take(self, logits: Tensor) -> None:
        """Copy the asked rows of the block's ``logits`` [rows, words]."""
        for each in self._rows:
            each.watch.tell(each.take, logits)

    def take_words(self, logits: Tensor, words: slice, of: int) -> None:
        """The same for some ``words`` of the block, with tokens as columns: ``logits`` [words, rows]; ``of``
        is how many words there are in all."""
        for each in self._rows:
            each.watch.tell(each.take_words, logits, words, of)

    def give(self, lse: Tensor, losses: Tensor) -> None:
        """Hand over what was taken, with ``lse`` and ``losses`` [rows] of the block."""
        with torch.no_grad():
            for each in self._rows:
                each.watch.tell(self._give, each, lse, losses)

    def _give(self, each: _Rows, lse: Tensor, losses: Tensor) -> None:
        if each.logits is not None:
            at = each.local.to(lse.device)
            each.watch.fn(self._asked.block(each.rows, each.logits, lse[at], losses[at]))


class _Rows:
    """Rows of one block for one watch."""

    def __init__(self, watch: _LossWatch, rows: list[int], local: Tensor) -> None:
        self.watch, self.rows, self.local = watch, rows, local
        self.logits: Tensor | None = None

    def take(self, logits: Tensor) -> None:
        self.logits = logits.detach()[self.local.to(logits.device)]

    def take_words(self, logits: Tensor, words: slice, of: int) -> None:
        if self.logits is None:
            self.logits = logits.new_empty(len(self.rows), of)
        self.logits[:, words] = logits[:, self.local.to(logits.device)].t()


def asked(labels: Tensor, *, first: int, words: int, whole: int) -> Asked | None:
    """Who asks for logits of the loss of ``labels`` [s, b]; None where nobody does, or it is recomputed.

    This rank has ``words`` words that are no padding, from id ``first`` on, of ``whole``.
    """
    watches = _watches
    if not watches or progress.is_recomputing():
        return None
    return Asked(watches, labels, first, words, whole)


# A loss that is not blocked: the logits of a micro-batch are one block. Megatron's vocabulary-parallel
# cross-entropy tells what it has summed over the ranks.

_whole: Kept | None = None
_highest: Tensor | None = None


@contextmanager
def whole_logits(logits: Tensor, labels: Tensor, *, first: int, words: int, whole: int) -> Iterator[None]:
    """Within it the loss of ``logits`` [s, b, v] and ``labels`` [s, b] is computed; the rest as ``asked``."""
    global _whole, _highest
    found = asked(labels, first=first, words=words, whole=whole)
    kept = None if found is None else found.within(0, labels.numel())
    if kept is None:
        yield
        return
    kept.take(logits.reshape(-1, logits.shape[-1]))
    outer, _whole = _whole, kept
    try:
        yield
    finally:
        _whole, _highest = outer, None


def highest_logits(highest: Tensor) -> None:
    """For the loss: the largest logit of every token over the whole vocabulary."""
    global _highest
    if _whole is not None:
        _highest = highest


def summed_exponentials(total: Tensor, losses: Tensor) -> None:
    """For the loss: the sum of exp(logit - highest) of every token over the whole vocabulary."""
    if _whole is not None and _highest is not None:
        with torch.no_grad():
            lse = _highest.reshape(-1).float() + total.reshape(-1).float().log()
        _whole.give(lse, losses.detach().reshape(-1).float())
