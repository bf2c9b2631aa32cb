"""Load-balancing loss and z-loss of a router, correct for every division of the tokens over ranks.

Switch's loss per micro-batch is upstream's function. The loss per sequence is DeepSeek-V3's (arXiv:
2412.19437, equations 17 to 20): per sequence, the sum over experts of f_e * P_e, with f_e = experts /
(topk * tokens) times the tokens routed to e, and P_e the mean of the normalised scores.

A rank holds some tokens of each sequence (tensor x context parallel). Counts are added up over those
ranks, scores are not: the loss of a rank is its part, and the parts add up to the whole, in the value
as in the gradients that Megatron adds up later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_megatron.layers.moe.router_topk import RouterOptions, count_tokens, score_type
from mt_megatron.parallel.group_names import name_of
from mt_megatron.seams import collectives


def balancing_scores(logits: Tensor, options: RouterOptions) -> Tensor:
    """Scores of all experts in ``score_type``, [tokens, num_experts], each token's adding up to 1; without
    bias and whatever groups allow. (Sigmoid scores for one expert per token stay as in 0.12.)"""
    if options.score_function == "sigmoid":
        scores = torch.sigmoid(logits.to(score_type(logits)))
        return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if options.topk > 1 else scores
    return torch.softmax(logits, dim=-1, dtype=score_type(logits))


def tokens_per_sequence(indices: Tensor, batch_size: int, num_experts: int) -> Tensor:
    """int64 [batch, num_experts], of experts [tokens, topk] whose tokens are [sequence, batch]."""
    sequence = torch.arange(indices.size(0), device=indices.device).remainder_(batch_size)
    cells = indices + (sequence * num_experts).unsqueeze(1)
    return count_tokens(cells, batch_size * num_experts).view(batch_size, num_experts)


def sequence_loss(scores: Tensor, counts: Tensor, topk: int, coefficient: float, group: Any = None) -> Tensor:
    """This rank's part of the mean over sequences of their balancing loss.

    ``scores`` are [tokens, num_experts] of this rank's tokens [sequence, batch]; ``counts`` int64
    [batch, num_experts] of the same. ``group`` holds the other tokens of these sequences.
    """
    batch, experts = counts.shape
    parts = 1
    if group is not None:
        parts = torch.distributed.get_world_size(group)
        counts = counts.clone()
        with collectives.announced("all_reduce", name_of(group), group, counts):
            torch.distributed.all_reduce(counts, group=group)
    length = scores.size(0) // batch * parts
    chances = scores.view(-1, batch, experts).sum(dim=0)
    return (chances * counts).sum() * (coefficient * experts / (topk * length * length * batch))


def attach_balancing_loss(router: Any, activation: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
    """``activation`` with the balancing loss's gradient on it.

    ``counts`` are int64 [num_experts] for a loss per micro-batch, [batch, num_experts] for one per
    sequence. Does nothing without a coefficient and outside of training; is tracked in passes that count.
    """
    config, now = router.config, router.passes.now(router)
    if not config.moe_aux_loss_coeff or not now.attached:
        return activation
    group, coefficient = _domain(config)
    if counts.dim() == 1:
        from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

        # Upstream adds up the counts of all ranks in place.
        loss = switch_load_balancing_loss_func(
            scores, counts.clone(), router.topk, coefficient, sequence_partition_group=group
        )
    else:
        loss = sequence_loss(scores, counts, router.topk, coefficient, group)
    parts = 1 if group is None else torch.distributed.get_world_size(group)
    if now.counted:
        tracked = loss.detach() / coefficient
        _track(router, "load_balancing_loss", tracked, group)
        if router.load is not None:
            router.load.add_balancing_loss(tracked, parts)
    return _attach(activation, loss, config, tokens=scores.size(0) * parts)


def attach_z_loss(router: Any, logits: Tensor) -> Tensor:
    """``logits`` [tokens, num_experts] with the gradient of ST-MoE's z-loss (arXiv:2202.08906) on them.

    Does nothing without a coefficient and outside of training; is tracked in passes that count.
    """
    config, now = router.config, router.passes.now(router)
    if not config.moe_z_loss_coeff or not now.attached:
        return logits
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import z_loss_func

    parts = parallel_state.get_tensor_and_context_parallel_world_size()
    coefficient = config.moe_z_loss_coeff / parts
    loss = z_loss_func(logits, coefficient)
    if now.counted:
        tracked = loss.detach() / coefficient
        everywhere = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        _track(router, "z_loss", tracked, None, everywhere)
        if router.load is not None:
            router.load.add_z_loss(tracked)
    return _attach(logits, loss, config, tokens=logits.size(0) * parts)


def loss_scale_factor(config: Any, num_microbatches: int) -> int:
    """What upstream's scale of these losses, loss scale / micro-batches, lacks.

    Gradients are averaged over context parallel ranks, and the loss of tokens is multiplied by their
    number to make up for it; these losses have to be too. Where a loss per token is asked for, no
    gradient is divided by the number of micro-batches, but by the tokens of all of them.
    """
    return num_microbatches if config.calculate_per_token_loss else int(config.context_parallel_size)


def _domain(config: Any) -> tuple[Any, float]:
    """The ranks that hold the other tokens of these sequences, None when there are none, and the
    coefficient for this rank's part."""
    from megatron.core import parallel_state

    coefficient = float(config.moe_aux_loss_coeff)
    if config.moe_token_dispatcher_type == "alltoall_seq":
        # There the logits of the tensor parallel ranks are gathered: each has all their tokens.
        coefficient /= parallel_state.get_tensor_model_parallel_world_size()
        group = parallel_state.get_context_parallel_group()
    else:
        group = parallel_state.get_tensor_and_context_parallel_group()
    return (group if torch.distributed.get_world_size(group) > 1 else None), coefficient


def _attach(activation: Tensor, loss: Tensor, config: Any, *, tokens: int) -> Tensor:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    # Gradients are going to be divided by the tokens of the whole batch.
    scaled = loss * tokens if config.calculate_per_token_loss else loss
    attached: Tensor = MoEAuxLossAutoScaler.apply(activation, scaled)
    return attached


def _track(router: Any, name: str, loss: Tensor, summed_over: Any, averaged_over: Any = None) -> None:
    from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

    layers = router.config.num_layers
    if router.layer_number is not None and router.layer_number <= layers:
        save_to_aux_losses_tracker(
            name, loss, router.layer_number, layers, reduce_group=summed_over, avg_group=averaged_over
        )


# The loss function's part. Gradients of a loss per token are divided by the tokens that the loss functions
# of all ranks return, added up. The trainer's returns sum and tokens of its rank. Megatron-LM's (0.9)
# returns the sum over context parallel ranks, times their number, and the tokens of all of them: each token
# is counted by every rank, which the factor makes up for. The routers' losses of all stages would need the
# factor too, so the last stage brings such a result to the first form; the loss of tokens is as before.

_summed_over_context = False
"""True where the loss function of the step that runs now returns sums over all context parallel ranks."""


def returns_may_be_summed(config: Any) -> bool:
    """True where routers have losses whose weight depends on the form of the loss function's result."""
    has_losses = getattr(config, "moe_aux_loss_coeff", 0) or getattr(config, "moe_z_loss_coeff", None)
    summed = config.calculate_per_token_loss and config.context_parallel_size > 1
    return bool(has_losses and summed and torch.is_grad_enabled())


def with_own_tokens(forward_step: Callable[..., Any], reports: list[Any]) -> Callable[..., Any]:
    """``forward_step`` whose loss function returns this rank's part of sum and tokens.

    ``reports`` is the schedule's list of what the loss functions of a step have reported: empty before the
    first, whose result is measured for the whole step.
    """

    @functools.wraps(forward_step)
    def step(*args: Any) -> Any:
        output, loss_function = forward_step(*args)

        def loss(output: Any, **options: Any) -> Any:
            # Losses of tokens are [b, s]. Another gradient of logits would be as large as they are.
            if options or not isinstance(output, Tensor) or output.dim() > 2 or not output.requires_grad:
                return loss_function(output, **options)
            losses = output.view_as(output)  # without the hooks of ``output``
            found = loss_function(losses)
            if len(found) != 3:
                return found
            return (*_own_part(losses, found[0], found[1], first=not reports), found[2])

        return output, loss

    return step


def _own_part(losses: Tensor, total: Tensor, tokens: Tensor, *, first: bool) -> tuple[Tensor, Tensor]:
    from megatron.core import parallel_state

    global _summed_over_context
    size = parallel_state.get_context_parallel_world_size()
    if first:
        _summed_over_context = _is_summed(losses, total, tokens, size)
    if not _summed_over_context:
        return total, tokens
    rank = parallel_state.get_context_parallel_rank()
    # Whole numbers that add up to the tokens of all ranks.
    return total / size, tokens // size + (rank < tokens % size)


def _is_summed(losses: Tensor, total: Tensor, tokens: Tensor, size: int) -> bool:
    """True where every counted token's loss is taken ``size`` times, and ``tokens`` are those of all context
    parallel ranks. Measured by the gradient of ``total`` by ``losses``, on all last stages at once: the ranks
    agree, and all micro-batches of a step are taken alike, so that the loss of tokens is the same either way.
    """
    from megatron.core import parallel_state

    found = torch.autograd.grad(total, losses, retain_graph=True, allow_unused=True)[0]
    weights = torch.zeros_like(losses) if found is None else found
    counted = weights != 0
    whole = counted.sum()
    _sum(whole, parallel_state.get_context_parallel_group())
    other = (counted & (weights != size)).sum() + (whole != tokens).sum()
    facts = torch.stack([counted.sum(), other])
    _sum(facts, parallel_state.get_data_parallel_group(with_context_parallel=True))
    somewhere, otherwise = facts.tolist()
    return bool(somewhere > 0 and otherwise == 0)


def reduce_across_ranks(device: torch.device) -> None:
    """Upstream's ``reduce_aux_losses_tracker_across_ranks``, also over ranks without a router; every rank
    must call it.

    First over the ranks of a stage, which track the same losses, then over the stages, which may not:
    they agree on the names before any rank waits for a sum. A stage that tracked nothing gets the others'
    values, on ``device``.
    """
    from megatron.core import parallel_state

    tracker = parallel_state.get_moe_layer_wise_logging_tracker()
    for name in sorted(tracker):
        values, within = tracker[name]["values"], tracker[name]
        if within.get("reduce_group") is not None:
            _sum(values, within["reduce_group"])
        if within.get("avg_group") is not None:
            _sum(values, within["avg_group"])
            values /= dist.get_world_size(within["avg_group"])
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = dist.get_world_size(group)
    if stages == 1:
        return
    sizes_by_stage: list[Any] = [None] * stages
    own = {name: len(each["values"]) for name, each in tracker.items()}
    with collectives.announced("all_gather_object", name_of(group), group):
        dist.all_gather_object(sizes_by_stage, own, group=group)
    sizes: dict[str, int] = {name: size for each in sizes_by_stage for name, size in each.items()}
    for name in sorted(sizes):
        if name not in tracker:
            tracker[name] = {"values": torch.zeros(sizes[name], device=device)}
        _sum(tracker[name]["values"], group)


def _sum(values: torch.Tensor, group: Any) -> None:
    with collectives.announced("all_reduce", name_of(group), group, values):
        dist.all_reduce(values, group=group)
