"""Output layer and vocabulary-parallel cross-entropy in one, a block of tokens at a time.

Logits exist for one block only, in the layer's dtype, and in fp32 for a few rows of it. Where the
gradient of every token's loss is announced (``seams.loss_gradient``) both gradients of the output
layer are computed while the block's softmax is at hand: three matrix products in all, and the weight
gradient goes straight into ``weight.main_grad``. Otherwise backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.layers import linear
from mt_megatron.layers.loss import cross_entropy_blocks
from mt_megatron.layers.loss.cross_entropy_blocks import Blocks, asked_of, leave_out, padding_from
from mt_megatron.seams.gemm import WeightRef, gemm
from mt_megatron.seams.taps.loss import Asked, Kept


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    announced: Tensor | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T`` against ``labels``, in nats, float32 [s, b].

    ``hidden`` is [s, b, h], or this rank's [s / tp, b, h] under ``sequence_parallel``; ``weight`` this
    rank's rows of the vocabulary, [v / tp, h]; ``labels`` int64 [s, b], ids of the whole vocabulary.
    Ids from ``vocab_size`` on pad the vocabulary: they have no share of the softmax. None: none do.
    Softmax and sums are fp32. ``announced`` float32 [s, b] is the gradient that backward is going to
    bring; it is used for a parameter that has a ``main_grad`` or needs no gradient. What backward
    brings is compared with it, and a difference is computed and added, so that gradients are right
    either way. ``gradient_accumulation_fusion`` adds to ``main_grad`` without an announcement as well. A
    ``main_grad`` narrower than fp32 is held in fp32, 4 bytes per element of the weight, while several blocks
    are added to it.
    """
    training = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if announced is not None and (not training or not _takes_gradient_early(weight)):
        announced = None
    losses: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, vocab_size, announced, sequence_parallel, gradient_accumulation_fusion
    )
    return losses


def _takes_gradient_early(weight: Tensor) -> bool:
    if not weight.requires_grad:
        return True
    if getattr(weight, "zero_out_wgrad", False) and _has_stages():
        # The stage's copy of the embedding for further depths: its embedding adds in backward, and the order
        # of the two would be that of the schedule.
        return False
    return weight.is_leaf and getattr(weight, "main_grad", None) is not None


def _has_stages() -> bool:
    return bool(parallel_state.get_pipeline_model_parallel_world_size() > 1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int | None,
        announced: Tensor | None,
        sequence_parallel: bool,
        gradient_accumulation_fusion: bool,
    ) -> Tensor:
        ctx.dtype = linear._autocast_dtype(hidden)
        ctx.vocab_size = vocab_size
        ctx.sequence_parallel = sequence_parallel
        ctx.into_main_grad = gradient_accumulation_fusion or announced is not None
        # What was done in forward counts for one backward; a second one finds nothing done.
        ctx.announced = announced
        linear._keep_weight(ctx, weight)
        with linear._autocast_off(hidden):
            hidden = linear._cast(hidden, ctx.dtype).contiguous()
            total = linear._gather(hidden)[0] if sequence_parallel else hidden
            blocks = _blocks(total, weight, labels, vocab_size, ctx.dtype)
            asked = blocks.asked(labels)
            if announced is None:
                losses, lse = blocks.losses(asked=asked)
                ctx.save_for_backward(hidden, labels, lse)
            else:
                needs_hidden, needs_weight = ctx.needs_input_grad[:2]
                gradient = torch.empty_like(total) if needs_hidden or blocks.group is not None else None
                into = _accumulator(weight, True, blocks) if needs_weight else None
                losses, lse = blocks.losses(announced.reshape(-1), gradient, into, asked=asked)
                if into is not None:
                    _put_back(into, weight)
                reduced = _reduced(gradient, hidden, sequence_parallel, blocks.group)
                ctx.save_for_backward(hidden, labels, lse, reduced)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels, lse = ctx.saved_tensors[:3]
        weight, done = linear._kept_weight(ctx), ctx.announced
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = grad_weight = None
        if done is not None:
            ctx.announced = None
            grad_hidden = ctx.saved_tensors[3]
            if needs_weight:
                _mark_as_added(weight)
            if torch.equal(grad_losses, done):
                return grad_hidden, grad_weight, None, None, None, None, None
            grad_losses = grad_losses - done
        with linear._autocast_off(hidden):
            total = linear._gather(hidden)[0] if ctx.sequence_parallel else hidden
            blocks = _blocks(total, weight, labels, ctx.vocab_size, ctx.dtype)
            gradient = torch.empty_like(total) if needs_hidden or blocks.group is not None else None
            into = None
            if needs_weight:
                into = _accumulator(weight, ctx.into_main_grad, blocks)
            blocks.gradients(lse, grad_losses.reshape(-1), gradient, into)
            reduced = _reduced(gradient, hidden, ctx.sequence_parallel, blocks.group)
        if into is not None and ctx.into_main_grad:
            _put_back(into, weight)
            _mark_as_added(weight)
        elif into is not None:
            grad_weight = into.to(weight.dtype)
        if grad_hidden is not None and reduced is not None:
            reduced = reduced + grad_hidden
        return reduced, grad_weight, None, None, None, None, None


def _mark_as_added(weight: Tensor) -> None:
    """Tell DDP's hook, which runs without a gradient too: a stand-in would be as large as the weight."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True


def _accumulator(weight: Tensor, fused: bool, blocks: Blocks | Panels) -> Tensor:
    """Where the blocks' gradients of ``weight`` add up: in fp32, however narrow the gradient is in the end.

    ``fused``: ``main_grad`` itself where it is fp32 or is added to once, as by any other linear. Else a copy,
    4 bytes per element of the weight, which ``_put_back`` rounds once.
    """
    if not fused:
        return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    main_grad = linear._main_grad(weight)
    return main_grad if blocks.adds_once else main_grad.float()


def _put_back(into: Tensor, weight: Tensor) -> None:
    main_grad = linear._main_grad(weight)
    if into is not main_grad:
        main_grad.copy_(into)


def _blocks(
    total: Tensor, weight: Tensor, labels: Tensor, vocab_size: int | None, dtype: torch.dtype | None
) -> Blocks | Panels:
    group = parallel_state.get_tensor_model_parallel_group()
    shared = group is not None and group.size() > 1
    place: dict[str, Any] = {
        "first": weight.shape[0] * group.rank() if shared else 0,
        "vocab_size": vocab_size,
        "group": group if shared else None,
    }
    reference = WeightRef(weight)
    hidden, weight, labels = linear._flat(total), linear._cast(weight, dtype), labels.reshape(-1)
    if hidden.device.type == "cpu" and hidden.dtype is torch.float32 and reference.recipe is None:
        return Panels(hidden, weight, labels, **place)
    return Blocks(hidden, weight, labels, reference=reference, **place)


def _reduced(gradient: Tensor | None, hidden: Tensor, sequence_parallel: bool, group: Any) -> Tensor | None:
    """The input gradient, summed over the ranks that share the vocabulary."""
    if gradient is None or group is None:
        return gradient
    if sequence_parallel:
        shard = torch.empty_like(hidden)
        linear._Collective("reduce_scatter", shard, linear._reduce_scatter, gradient).wait()
        return shard
    linear._Collective("all_reduce", gradient, dist.all_reduce).wait()
    return gradient


# The blocked cross-entropy in fp32 on a CPU, where matrix products take almost all of the time.
#
# Logits lie with tokens as columns and are made a panel of the vocabulary at a time: with a few hundred
# tokens BLAS then divides the long side among its threads and packs no weight for nothing. A panel becomes
# exponentials while it is in the cache, and stays so: what divides them into a softmax, and the label's
# share, are factors of single tokens and go to the products' narrow sides. So the panel can be multiplied
# with its weights, for the gradient of the hidden states, while both are still in the cache.

_PANEL = 2048 * 192
"""Logits of one panel: 1.5 MiB."""

_HEADROOM = 1e13
"""What a panel's exponentials may sum to before their token's reference moves: its own logits are then about
30 above it, far from overflow."""

_MULTIPLE = 16
"""Tokens of a block are a multiple of what BLAS's kernels take at once."""


class Panels:
    """``Blocks`` for fp32 operands on a CPU: the same arguments without a recipe, the same results."""

    adds_once = False
    """Products and labels' shares are added to a weight gradient apart."""

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
        self._first, self._vocab_size = first, vocab_size
        self._inside = (labels >= first) & (labels < first + weight.shape[0])
        self._column = torch.where(self._inside, labels - first, 0)
        self._size = weight.shape[0]
        self._padding = padding_from(vocab_size, first, self._size)

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
        """Loss and log-sum-exp of every token, float32 [t]; with ``grad`` [t] the gradients too, into
        ``grad_hidden`` [t, h] and added to ``grad_weight`` [v, h]; either may be None. ``asked``: who wants
        to see logits."""
        losses = self.hidden.new_empty(self.hidden.shape[0])
        lse = torch.empty_like(losses)
        for rows, powers in self._blocks():
            into = None if grad is None else _rows(grad_hidden, rows)
            kept = None if asked is None else asked.within(rows.start, rows.stop)
            reference, total, predicted = self._exponentials(rows, powers, into, kept)
            highest, denominator = reference, total
            if self.group is not None:
                highest, denominator, predicted = self._combined(reference, total, predicted)
            lse[rows] = highest + denominator.log()
            losses[rows] = lse[rows] - predicted
            if kept is not None:
                kept.give(lse[rows], losses[rows])
            if grad is not None:
                share = grad[rows] * (reference - highest).exp_() / denominator
                self._finish(rows, powers, share, grad[rows], into, grad_weight)
        return losses, lse

    def gradients(
        self, lse: Tensor, grad: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None
    ) -> None:
        """The gradients alone, from logits computed again and the ``lse`` of ``losses``."""
        for rows, powers in self._blocks():
            into = _rows(grad_hidden, rows)
            for ids in self._panels(powers.shape[1]):
                panel = torch.sub(self._logits(rows, ids), lse[rows], out=powers[ids]).exp_()
                self._add_to_hidden(ids, panel, into)
            self._finish(rows, powers, grad[rows], grad[rows], into, grad_weight)

    def _exponentials(
        self, rows: slice, powers: Tensor, into: Tensor | None, kept: Kept | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fill ``powers`` [v, t] with exp(logit - reference), and ``into`` [t, h] with its product with the
        weights; the references, sums and label's logits [t]."""
        column, inside = self._column[rows], self._inside[rows]
        total = torch.zeros(powers.shape[1])
        predicted = torch.zeros_like(total)
        reference = total
        for ids in self._panels(powers.shape[1]):
            logits = self._logits(rows, ids)
            if kept is not None:
                kept.take_words(logits, ids, self._size)
            at = column - ids.start
            here = inside & (at >= 0) & (at < logits.shape[0])
            label = logits.gather(0, at.clamp_(0, logits.shape[0] - 1)[None])[0]
            predicted = torch.where(here, label, predicted)
            if ids.start == 0:
                reference = logits.amax(dim=0)
            panel = powers[ids]
            sums = torch.sub(logits, reference, out=panel).exp_().sum(dim=0)
            if ids.start and not bool((sums < _HEADROOM).all()):
                moved = torch.maximum(logits.amax(dim=0), reference)
                factor = (reference - moved).exp_()
                powers[: ids.start].mul_(factor)
                if into is not None:
                    into.mul_(factor[:, None])
                total.mul_(factor)
                reference = moved
                sums = torch.sub(logits, reference, out=panel).exp_().sum(dim=0)
            total.add_(sums)
            del logits  # A product may copy the panel.
            self._add_to_hidden(ids, panel, into)
        return reference, total, predicted

    def _add_to_hidden(self, ids: slice, panel: Tensor, into: Tensor | None) -> None:
        if into is not None:
            gemm("dgrad", panel.t(), self.weight[ids], out=into, accumulate=ids.start > 0)

    def _combined(self, reference: Tensor, total: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same over the whole vocabulary, of which every rank has a part: one exchange."""
        mine = torch.stack([reference, total, predicted])
        every = mine.new_empty(self.group.size() * 3, mine.shape[1])
        linear._Collective("all_gather", every, linear._all_gather, mine).wait()
        references, totals, labels = every.view(self.group.size(), 3, -1).unbind(dim=1)
        highest = references.amax(dim=0)
        return highest, ((references - highest).exp_() * totals).sum(dim=0), labels.sum(dim=0)

    def _finish(
        self,
        rows: slice,
        powers: Tensor,
        share: Tensor,
        grad: Tensor,
        into: Tensor | None,
        grad_weight: Tensor | None,
    ) -> None:
        """The logits' gradient is ``share * powers``, less ``grad`` at the label; it is never formed."""
        column = self._column[rows]
        label = torch.where(self._inside[rows], grad, 0.0)[:, None]
        if into is not None:
            into.mul_(share[:, None]).sub_(self.weight[column].mul_(label))
        if grad_weight is not None:
            hidden = self.hidden[rows]
            gemm("wgrad", powers.t(), hidden * share[:, None], out=grad_weight, accumulate=True)
            grad_weight.index_add_(0, column, (hidden * label).to(grad_weight.dtype), alpha=-1)

    def _logits(self, rows: slice, ids: slice) -> Tensor:
        """The logits [words, tokens] of one panel."""
        # The transposed product: words take the tokens' place.
        logits = gemm("fprop", self.weight[ids], self.hidden[rows])
        if ids.stop > self._padding:
            leave_out(logits.t(), max(self._padding - ids.start, 0))
        return logits

    def _panels(self, tokens: int) -> Iterator[slice]:
        step = max(_MULTIPLE, _PANEL // max(tokens, 1))
        for start in range(0, self._size, step):
            yield slice(start, min(self._size, start + step))

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


def _rows(grad_hidden: Tensor | None, rows: slice) -> Tensor | None:
    return None if grad_hidden is None else linear._flat(grad_hidden)[rows]
