"""The blocked cross-entropy's arithmetic in fp32 on a CPU, where its matrix products are all that counts.

Logits lie with tokens as columns and are made a panel of the vocabulary at a time: with a few hundred
tokens BLAS then divides the long side among its threads and packs no weight for nothing. A panel
becomes exponentials while it is in the cache, and stays so: what divides them into a softmax, and the
label's share, are factors of single tokens and go to the products' narrow sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..seams.gemm import gemm
from . import cross_entropy_blocks, linear
from .cross_entropy_blocks import leave_out, padding_from

_PANEL = 2048
"""Words of one panel: with 192 tokens 1.5 MiB of logits."""

_HEADROOM = 30.0
"""How far above its token's reference a logit may be before the reference moves: far from overflow in
the exponentials and in their sums."""

_MULTIPLE = 16
"""Tokens of a block are a multiple of what BLAS's kernels take at once."""


class Panels:
    """``Blocks`` for fp32 operands on a CPU: the same arguments without a recipe, the same results."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        first: int,
        vocab_size: int | None,
        group: Any,
    ) -> None:
        self.hidden, self.weight, self.group = hidden, weight, group
        self._inside = (labels >= first) & (labels < first + weight.shape[0])
        self._column = torch.where(self._inside, labels - first, 0)
        self._size = weight.shape[0]
        self._padding = padding_from(vocab_size, first, self._size)

    def losses(
        self,
        grad: Tensor | None = None,
        grad_hidden: Tensor | None = None,
        grad_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss and log-sum-exp of every token, float32 [t]; with ``grad`` [t] the gradients too, into
        ``grad_hidden`` [t, h] and added to ``grad_weight`` [v, h]; either may be None."""
        losses = self.hidden.new_empty(self.hidden.shape[0])
        lse = torch.empty_like(losses)
        for rows, powers in self._blocks():
            reference, total, predicted = self._exponentials(rows, powers)
            highest, denominator = reference, total
            if self.group is not None:
                highest, denominator, predicted = self._combined(reference, total, predicted)
            lse[rows] = highest + denominator.log()
            losses[rows] = lse[rows] - predicted
            if grad is not None:
                share = grad[rows] * (reference - highest).exp_() / denominator
                self._products(rows, powers, share, grad[rows], grad_hidden, grad_weight)
        return losses, lse

    def gradients(
        self, lse: Tensor, grad: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None
    ) -> None:
        """The gradients alone, from logits computed again and the ``lse`` of ``losses``."""
        for rows, powers in self._blocks():
            for _, panel in self._logits(rows, powers):
                panel.sub_(lse[rows]).exp_()
            self._products(rows, powers, grad[rows], grad[rows], grad_hidden, grad_weight)

    def _exponentials(self, rows: slice, powers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fill ``powers`` [v, t] with exp(logit - reference); the references, sums and label's logits [t]."""
        column, inside = self._column[rows], self._inside[rows]
        total = torch.zeros(powers.shape[1])
        predicted = torch.zeros_like(total)
        reference = total
        for ids, panel in self._logits(rows, powers):
            at = column - ids.start
            here = inside & (at >= 0) & (at < panel.shape[0])
            label = panel.gather(0, at.clamp_(0, panel.shape[0] - 1)[None])[0]
            predicted = torch.where(here, label, predicted)
            highest = panel.amax(dim=0)
            if ids.start == 0:
                reference = highest
            elif bool((highest > reference + _HEADROOM).any()):
                moved = torch.maximum(highest, reference)
                factor = (reference - moved).exp_()
                powers[: ids.start].mul_(factor)
                total.mul_(factor)
                reference = moved
            panel.sub_(reference).exp_()
            total.add_(panel.sum(dim=0))
        return reference, total, predicted

    def _combined(self, reference: Tensor, total: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same over the whole vocabulary, of which every rank has a part: one exchange."""
        mine = torch.stack([reference, total, predicted])
        every = mine.new_empty(self.group.size() * 3, mine.shape[1])
        linear._Collective("all_gather", every, linear._all_gather, mine).wait()
        references, totals, labels = every.view(self.group.size(), 3, -1).unbind(dim=1)
        highest = references.amax(dim=0)
        return highest, ((references - highest).exp_() * totals).sum(dim=0), labels.sum(dim=0)

    def _products(
        self,
        rows: slice,
        powers: Tensor,
        share: Tensor,
        grad: Tensor,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
    ) -> None:
        """The logits' gradient is ``share * powers``, less ``grad`` at the label; neither is formed."""
        column = self._column[rows]
        label = torch.where(self._inside[rows], grad, 0.0)[:, None]
        if grad_hidden is not None:
            out = linear._flat(grad_hidden)[rows]
            gemm("dgrad", powers.t(), self.weight, out=out)
            out.mul_(share[:, None]).sub_(self.weight[column].mul_(label))
        if grad_weight is not None:
            hidden = self.hidden[rows]
            gemm("wgrad", powers.t(), hidden * share[:, None], out=grad_weight, accumulate=True)
            grad_weight.index_add_(0, column, (hidden * label).to(grad_weight.dtype), alpha=-1)

    def _logits(self, rows: slice, out: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The ids and logits [words, tokens] of every panel, written to ``out`` [v, t]."""
        hidden = self.hidden[rows]
        for start in range(0, self._size, _PANEL):
            ids = slice(start, min(self._size, start + _PANEL))
            gemm("fprop", hidden, self.weight[ids], out=out[ids].t())
            if ids.stop > self._padding:
                leave_out(out[ids].t(), max(self._padding - start, 0))
            yield ids, out[ids]

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of almost equal length, each with room for its logits [v, t], which all share."""
        tokens = self.hidden.shape[0]
        most = max(
            _MULTIPLE, cross_entropy_blocks._BUDGET["cpu"] // (4 * self._size) // _MULTIPLE * _MULTIPLE
        )
        count = max(1, -(-tokens // most))
        ends = [round(tokens * (i + 1) / count / _MULTIPLE) * _MULTIPLE for i in range(count - 1)] + [tokens]
        longest = max(stop - start for start, stop in zip([0, *ends], ends, strict=False))
        room = self.hidden.new_empty(longest * self._size)
        start = 0
        for stop in ends:
            yield slice(start, stop), room[: (stop - start) * self._size].view(self._size, stop - start)
            start = stop
