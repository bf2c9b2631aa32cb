"""The arithmetic of the blocked cross-entropy: logits, softmax and gradients of some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mt_megatron.layers import linear
from mt_megatron.seams.gemm import Operand, WeightRef, gemm, prepared
from mt_megatron.seams.taps import loss as loss_taps
from mt_megatron.seams.taps.loss import Asked

_BUDGET = {"cpu": 96 << 20}
"""Bytes for one block, by device type. On a CPU less than 5 % of the fp32 logits of 4,096 tokens at 128,256
words; every block reads the weight and reads and writes its gradient, so longer ones are faster."""
_BUDGET_ELSEWHERE = 1 << 30

_CACHED = 4 << 20
"""Bytes of fp32 logits that are worked on at a time: what a processor's caches keep between passes."""

_TILE = 4 << 20
"""Bytes of a low-precision weight gradient before it is added to a wider buffer."""


class Blocks:
    """Rows of ``hidden`` [t, h] against ``weight`` [v, h], which holds the ids from ``first`` on; those
    from ``vocab_size`` on are padding.

    ``group`` is the tensor parallel group when the vocabulary is shared, else None; ``reference`` says
    whose ``weight`` it is. Every method allocates its blocks once and uses them again for each. A recipe
    of the weight's takes every block of rows as a tensor of its own.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        first: int,
        vocab_size: int | None,
        group: Any,
        reference: WeightRef,
    ) -> None:
        self.hidden, self.weight = hidden, weight
        self._first, self._vocab_size = first, vocab_size
        self.group, self._reference = group, reference
        self._recipe = reference.recipe
        self._input: Tensor | Operand = hidden
        inside = (labels >= first) & (labels < first + weight.shape[0])
        self._outside = torch.logical_not(inside)
        self._column = torch.where(inside, labels - first, 0)
        self._size = weight.shape[0]
        self._padding = padding_from(vocab_size, first, self._size)
        self._narrow = hidden.dtype is not torch.float32
        self._rows, self._wide_rows = self._row_counts()

    @property
    def adds_once(self) -> bool:
        """True where one block has all rows, so that a weight gradient is added to once."""
        return self._rows >= self.hidden.shape[0]

    def asked(self, labels: Tensor) -> Asked | None:
        """Who wants to see logits of these ``labels`` [s, b]."""
        return asked_of(labels, self._first, self._size, self._padding, self._vocab_size, self.group)

    def losses(
        self,
        grad: Tensor | None = None,
        grad_hidden: Tensor | None = None,
        grad_weight: Tensor | None = None,
        *,
        asked: Asked | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss and log-sum-exp of every row, float32 [t].

        With ``grad`` [t] the gradients are computed as well: into ``grad_hidden`` [t, h], and added to
        ``grad_weight`` [v, h]; either may be None. ``asked``: who wants to see logits.
        """
        tokens = self.hidden.shape[0]
        lse = torch.empty(tokens, dtype=torch.float32, device=self.hidden.device)
        predicted = torch.empty_like(lse)
        logits, wide = self._buffers()
        for rows in self._split(tokens, self._rows):
            block = self._logits(rows, logits)
            kept = None if asked is None else asked.within(rows.start, rows.stop)
            if kept is not None:
                kept.take(block)
            if self.group is None:
                for part in self._split(rows.stop - rows.start, self._wide_rows):
                    at = _shifted(part, rows.start)
                    values = self._widened(block[part], wide)
                    predicted[at] = self._picked(values, at)
                    lse[at] = _softmax(values)
                    if grad is not None:
                        self._to_gradient(values, block[part], at, grad[at])
            else:
                self._shared_losses(rows, block, wide, lse, predicted, grad)
            if kept is not None:
                kept.give(lse[rows], lse[rows] - predicted[rows])
            if grad is not None:
                self._products(rows, block, grad_hidden, grad_weight)
        return lse - predicted, lse

    def gradients(
        self, lse: Tensor, grad: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None
    ) -> None:
        """The gradients alone, from logits computed again and the ``lse`` of ``losses``."""
        logits, wide = self._buffers()
        for rows in self._split(self.hidden.shape[0], self._rows):
            block = self._logits(rows, logits)
            for part in self._split(rows.stop - rows.start, self._wide_rows):
                at = _shifted(part, rows.start)
                values = self._widened(block[part], wide)
                values.sub_(lse[at, None]).exp_()
                self._to_gradient(values, block[part], at, grad[at])
            self._products(rows, block, grad_hidden, grad_weight)

    def _shared_losses(
        self, rows: slice, block: Tensor, wide: Tensor, lse: Tensor, predicted: Tensor, grad: Tensor | None
    ) -> None:
        """As ``losses`` for one block whose other columns are on other ranks: one exchange."""
        parts = list(self._split(rows.stop - rows.start, self._wide_rows))
        mine = torch.empty(2, rows.stop - rows.start, dtype=torch.float32, device=block.device)
        for part in parts:
            values = self._widened(block[part], wide[part] if self._narrow else wide)
            mine[1, part] = self._picked(values, _shifted(part, rows.start))
            mine[0, part] = _softmax(values)
        every = mine.new_empty(self.group.size() * 2, mine.shape[1])
        linear._Collective("all_gather", every, linear._all_gather, mine).wait()
        every = every.view(self.group.size(), 2, -1)
        lse[rows] = torch.logsumexp(every[:, 0], dim=0)
        predicted[rows] = every[:, 1].sum(dim=0)
        if grad is None:
            return
        share = (mine[0] - lse[rows]).exp_()
        for part in parts:
            at = _shifted(part, rows.start)
            values = wide[part] if self._narrow else block[part]
            values.mul_(share[part, None])
            self._to_gradient(values, block[part], at, grad[at])

    def _products(
        self, rows: slice, block: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None
    ) -> None:
        how: dict[str, Any] = {"recipe": self._recipe, "weight": self._reference}
        grad = prepared("grad", block, self._reference)
        if grad_hidden is not None:
            out = linear._flat(grad_hidden)[rows]
            gemm("dgrad", grad, self.weight, out=out, **how)
        if grad_weight is None:
            return
        if not isinstance(grad, Tensor):
            gemm("wgrad", grad, self._input, out=grad_weight, accumulate=True, **how)
            return
        hidden, step = self.hidden[rows], self._size
        if grad_weight.dtype is not block.dtype:
            # The product is in the block's dtype and then added: in pieces that stay in the cache.
            step = max(256, _TILE // (self.hidden.shape[1] * block.element_size()))
        for ids in self._split(self._size, step):
            gemm(
                "wgrad",
                block[:, ids],
                hidden,
                out=grad_weight[ids],
                accumulate=True,
                **how,
            )

    def _logits(self, rows: slice, buffer: Tensor) -> Tensor:
        out = buffer[: rows.stop - rows.start]
        self._input = prepared("input", self.hidden[rows], self._reference, keep=True)
        logits = gemm("fprop", self._input, self.weight, out=out, recipe=self._recipe, weight=self._reference)
        leave_out(logits, self._padding)
        return logits

    def _widened(self, logits: Tensor, wide: Tensor) -> Tensor:
        """fp32 logits to work on in place: a copy, or the block itself where it is fp32."""
        return wide[: logits.shape[0]].copy_(logits) if self._narrow else logits

    def _picked(self, values: Tensor, at: slice) -> Tensor:
        """The label's logit of each row; zero where another rank has it."""
        picked = values.gather(1, self._column[at, None]).squeeze(1)
        return picked.masked_fill_(self._outside[at], 0.0)

    def _to_gradient(self, values: Tensor, block: Tensor, at: slice, grad: Tensor) -> None:
        """From the softmax in ``values`` to the gradient of the logits in ``block``."""
        values.mul_(grad[:, None])
        minus = grad.neg().masked_fill_(self._outside[at], 0.0)
        values.scatter_add_(1, self._column[at, None], minus[:, None])
        if self._narrow:
            block.copy_(values)

    def _row_counts(self) -> tuple[int, int]:
        budget = _BUDGET.get(self.hidden.device.type, _BUDGET_ELSEWHERE)
        tokens = max(1, self.hidden.shape[0])
        cached = max(1, _CACHED // (4 * self._size)) if self.hidden.device.type == "cpu" else tokens
        if not self._narrow:
            rows = budget // (4 * self._size)
        elif self.group is not None or cached == tokens:
            rows = budget // (6 * self._size)
        else:
            rows = (budget - 4 * cached * self._size - 2 * _TILE) // (2 * self._size)
        rows = min(tokens, max(16, rows // 16 * 16))
        # Equal blocks: a short last one would read the whole weight for a few rows.
        count = -(-tokens // rows)
        rows = -(-tokens // count)
        return rows, min(rows, cached)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """Room for one block's logits and for the rows of it that are widened."""
        logits = self.hidden.new_empty(self._rows, self._size)
        if not self._narrow:
            return logits, logits
        rows = self._wide_rows if self.group is None else self._rows
        wide = torch.empty(rows, self._size, dtype=torch.float32, device=logits.device)
        return logits, wide

    @staticmethod
    def _split(length: int, step: int) -> Iterator[slice]:
        for start in range(0, length, step):
            yield slice(start, min(length, start + step))


def asked_of(
    labels: Tensor, first: int, size: int, padding: int, vocab_size: int | None, group: Any
) -> Asked | None:
    """Who wants to see logits of ``labels`` [s, b]. This rank has ``size`` words from id ``first`` on, those
    from column ``padding`` on no words."""
    whole = vocab_size if vocab_size is not None else size * (1 if group is None else group.size())
    return loss_taps.asked(labels, first=first, words=padding, whole=whole)


def padding_from(vocab_size: int | None, first: int, size: int) -> int:
    """The first of ``size`` columns, which begin at id ``first``, that pads the vocabulary."""
    return size if vocab_size is None else min(max(vocab_size - first, 0), size)


def leave_out(logits: Tensor, padding: int) -> None:
    """Take the columns from ``padding`` on out of the softmax, in place.

    Not minus infinity: a rank may hold nothing but padding, and must not make NaN of it.
    """
    if padding < logits.shape[-1]:
        logits[..., padding:].fill_(torch.finfo(logits.dtype).min)


def _softmax(values: Tensor) -> Tensor:
    """Softmax of every row in place; returns its log-sum-exp.

    The largest share of a row is 1 / sum(exp(x - max)) and never underflows, so the fused kernel
    gives the sum without another pass of exponentials.
    """
    largest = values.amax(dim=-1)
    torch.softmax(values, dim=-1, out=values)
    return largest.sub_(values.amax(dim=-1).log_())


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
