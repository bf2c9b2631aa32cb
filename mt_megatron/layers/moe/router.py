"""``TopKRouter``'s routing in one pass, from the ``router_*`` modules."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from mt_megatron.backends.dtypes import has_float64
from mt_megatron.errors import ConfigError
from mt_megatron.layers.moe.expert_bias import add_expert_bias
from mt_megatron.layers.moe.router_capacity import Capacity, limit
from mt_megatron.layers.moe.router_losses import attach_balancing_loss, balancing_scores, tokens_per_sequence
from mt_megatron.layers.moe.router_passes import Passes
from mt_megatron.layers.moe.router_telemetry import RouterLoad
from mt_megatron.layers.moe.router_topk import RouterOptions, choose_experts, count_tokens

_log = logging.getLogger("mt_megatron")

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

_warned = False


def prepare(router: Any) -> None:
    """What a ``TopKRouter`` has beside upstream's, once upstream has made it.

    Raises ``ConfigError`` when its options contradict each other.
    """
    RouterOptions.of(router.config)
    if has_constant_weight(router.config) and not _warned:
        _log.warning("%s", constant_weight_warning())
    router.score_function = router.config.moe_router_score_function
    router.enable_expert_bias = router.config.moe_router_enable_expert_bias
    router.passes = Passes()
    router.load = None
    add_expert_bias(router)


def has_constant_weight(config: Any) -> bool:
    """True where the only expert of each token has the weight 1 in a model of ``config``, which is a
    ``TransformerConfig`` or has its fields: a softmax over one logit, without a gradient."""
    return bool(
        config.num_moe_experts is not None
        and config.moe_router_topk == 1
        and config.moe_router_score_function == "softmax"
        and not config.moe_router_pre_softmax
        and config.moe_router_load_balancing_type != "sinkhorn"
    )


def constant_weight_warning() -> str:
    """Warning of a model with ``has_constant_weight``. Whoever gets it shows it: routers that are built later
    in this process log none."""
    global _warned
    _warned = True
    return (
        "moe_router_topk is 1 and the softmax is over the chosen expert alone, so that its weight "
        "is always 1, as in Hugging Face's Mixtral with one expert per token: only the load-balancing and z "
        "losses train the router. A new model learns its routing with --moe-router-pre-softmax, which "
        "computes something else from the same weights."
    )


def listen(router: Any) -> RouterLoad:
    """Let ``router`` sum up its load from now on."""
    config = router.config
    # With this dispatcher the tensor parallel ranks gather their logits and route all tokens alike.
    alike = config.moe_token_dispatcher_type == "alltoall_seq"
    copies = config.tensor_model_parallel_size if alike else 1
    load = RouterLoad(config.num_moe_experts, router.weight.device, copies=copies)
    router.load = load
    return load


def jittered(router: Any, hidden: Tensor) -> Tensor:
    """``hidden`` times noise around 1 in its own type (``moe_input_jitter_eps``); a copy of ``hidden`` where
    the model is not trained, so that validation is the same every time and draws nothing.

    In fp32 the noise is what upstream's ``Uniform`` draws, to the bit.
    """
    eps = router.config.moe_input_jitter_eps
    if eps is None or not router.training:
        return hidden if eps is None else hidden.clone()
    low, high = torch.tensor([1.0 - eps, 1.0 + eps], dtype=torch.float32)
    noise = torch.rand(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    return hidden * noise.mul_((high - low).item()).add_(low.item())


def logits_of(router: Any, hidden: Tensor) -> Tensor | None:
    """Logits [..., num_experts] of ``hidden`` [..., hidden] in ``moe_router_dtype``; None where that is
    the type they have anyway. Autocast has no part in them."""
    name = router.config.moe_router_dtype
    if name is None:
        return None
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if not autocast and hidden.dtype is _DTYPES[name] and router.weight.dtype is _DTYPES[name]:
        return None
    if name == "fp64" and not has_float64(hidden.device):
        raise ConfigError(
            f"found moe_router_dtype fp64 on {hidden.device.type}, which has no float64 arithmetic; expected "
            "fp32, or none for the model's own type. Change moe_router_dtype"
        )
    logits: Tensor = _LinearInType.apply(hidden, router.weight, _DTYPES[name])  # type: ignore[no-untyped-call]
    return logits


def _autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    # Not earlier: it imports Megatron-Core, and this file is imported before it is.
    from mt_megatron.layers import linear

    return linear._autocast_off(tensor)


class _LinearInType(torch.autograd.Function):
    """A product computed in a wider type, which keeps its operands in theirs for backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = dtype
        with _autocast_off(hidden):
            return torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        of_hidden = of_weight = None
        with _autocast_off(hidden):
            if ctx.needs_input_grad[0]:
                of_hidden = (gradient @ weight.to(ctx.dtype)).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                rows = gradient.reshape(-1, gradient.size(-1))
                of_weight = (rows.t() @ hidden.reshape(-1, hidden.size(-1)).to(ctx.dtype)).to(weight.dtype)
        return of_hidden, of_weight, None


def route(router: Any, logits: Tensor, balancing: str, *, batch_size: int = 1) -> tuple[Tensor, Tensor]:
    """Weights and experts in upstream's shapes, from logits [tokens, num_experts].

    ``balancing`` is ``aux_loss``, ``seq_aux_loss``, whose sequences ``batch_size`` counts, or ``none``.
    Counts what there is to count.
    """
    config, now = router.config, router.passes.now(router)
    options, capacity = RouterOptions.of(config), Capacity.of(config)
    routing = choose_experts(logits, options, router.expert_bias)
    probs, indices, dropped = routing.weights, routing.indices, None
    if capacity is not None:
        limited = limit(routing, capacity, options.num_experts)
        probs, indices, dropped = limited.probs, limited.indices, limited.dropped
    has_loss = now.attached and balancing != "none" and bool(config.moe_aux_loss_coeff)
    counted = now.counted and (router.enable_expert_bias or router.load is not None)
    if not (has_loss or counted):
        return probs, indices
    scores = None
    if has_loss and balancing == "seq_aux_loss":
        per_sequence = tokens_per_sequence(routing.indices, batch_size, options.num_experts)
        scores = balancing_scores(logits, options)
        probs = attach_balancing_loss(router, probs, scores, per_sequence)
        counts = per_sequence.sum(dim=0)
    else:
        counts = count_tokens(routing.indices, options.num_experts)
        if has_loss:
            scores = balancing_scores(logits, options)
            probs = attach_balancing_loss(router, probs, scores, counts)
    if not counted:
        return probs, indices
    if router.enable_expert_bias:
        router.local_tokens_per_expert += counts
    if router.load is not None:
        if scores is None:
            scores = balancing_scores(logits.detach(), options)
        router.load.add_tokens(counts, dropped, scores)
    return probs, indices
