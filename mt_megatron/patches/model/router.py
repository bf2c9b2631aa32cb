"""The router scores, chooses, limits and balances as Megatron-Core 0.12 and DeepSeek's papers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ConfigError
from mt_megatron.patching.spec import Patch


def _init(original: Callable[..., None], self: Any, config: Any) -> None:
    original(self, config)
    from mt_megatron.layers.moe.router import prepare

    prepare(self)


def _apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """``Module._apply``, through which every cast and move goes."""
    from megatron.core.transformer.moe.router import TopKRouter

    from mt_megatron.layers.moe.expert_bias import kept_in_fp32

    inherited = super(TopKRouter, self)._apply
    return kept_in_fp32(self, lambda: inherited(fn, recurse))


def _gating(original: Callable[..., Any], self: Any, input: Any) -> Any:
    if self.weight.device != input.device:
        # Upstream moves a weight to the device at its first use.
        logits = original(self, input)
        if self.config.moe_router_dtype is None:
            return logits
    from mt_megatron.layers.moe.router import logits_of

    logits = logits_of(self, input)
    return original(self, input) if logits is None else logits


def _apply_input_jitter(self: Any, input: Any) -> Any:
    from mt_megatron.layers.moe.router import jittered

    return jittered(self, input)


def _forward(original: Callable[..., Any], self: Any, input: Any) -> Any:
    with self.passes.begun(self, batch_size=input.shape[1] if input.dim() > 2 else 1):
        return original(self, input)


def _routing(original: Callable[..., Any], self: Any, logits: Any) -> Any:
    if self.routing_type in ("sinkhorn", "aux_loss"):
        return original(self, logits)
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    logits = self.apply_z_loss(logits.view(-1, self.config.num_moe_experts))
    if self.config.moe_token_dispatcher_type == "alltoall_seq":
        logits = gather_from_sequence_parallel_region(logits)
    if self.routing_type == "seq_aux_loss":
        batch = self.passes.now(self).batch_size
        return self.seq_aux_loss_load_balancing(logits, batch, logits.size(0) // batch)
    from mt_megatron.layers.moe.router import route

    return route(self, logits, self.routing_type)


def _aux_loss(original: Callable[..., Any], self: Any, logits: Any) -> Any:
    from mt_megatron.layers.moe.router import route

    return route(self, logits, "aux_loss")


def _seq_aux_loss(self: Any, logits: Any, bsz: int, seq_length: int) -> Any:
    from mt_megatron.layers.moe.router import route

    return route(self, logits, "seq_aux_loss", batch_size=bsz)


def _apply_load_balancing_loss(
    original: Callable[..., Any], self: Any, probs: Any, num_local_tokens_per_expert: Any, activation: Any
) -> Any:
    from mt_megatron.layers.moe.router_losses import attach_balancing_loss

    return attach_balancing_loss(self, activation, probs, num_local_tokens_per_expert)


def _apply_z_loss(original: Callable[..., Any], self: Any, logits: Any) -> Any:
    from mt_megatron.layers.moe.router_losses import attach_z_loss

    return attach_z_loss(self, logits)


def _topk_softmax_with_capacity(
    logits: Any,
    topk: int,
    capacity_factor: float | None = None,
    pad_to_capacity: bool = False,
    drop_policy: str = "probs",
    use_pre_softmax: bool = False,
    deterministic_mode: bool = False,
) -> tuple[Any, Any, Any]:
    """Whoever calls it by itself gets the same choice among ties as the router."""
    from mt_megatron.layers.moe.router_capacity import Capacity, limit
    from mt_megatron.layers.moe.router_topk import RouterOptions, choose_experts, count_tokens

    if topk == 1 and not use_pre_softmax:
        raise ConfigError(
            "found topk 1 without use_pre_softmax; expected the softmax over all experts: over one logit "
            "it is always 1, which gives the router no gradient. Pass use_pre_softmax=True "
            "(--moe-router-pre-softmax) or a larger topk"
        )
    options = RouterOptions(num_experts=logits.size(1), topk=topk, pre_softmax=use_pre_softmax)
    options.check()
    routing = choose_experts(logits, options)
    counts = count_tokens(routing.indices, options.num_experts)
    if capacity_factor is None:
        return routing.weights, routing.indices, counts
    capacity = Capacity(factor=capacity_factor, pad=pad_to_capacity, policy=drop_policy)
    limited = limit(routing, capacity, options.num_experts)
    return limited.probs, limited.indices, counts


def _zero_grad_buffer(original: Callable[[Any], None], self: Any) -> None:
    original(self)
    from mt_megatron.layers.moe.expert_bias import step_begins

    step_begins(self)


def _optimizer_step(original: Callable[[Any], Any], self: Any) -> Any:
    from mt_megatron.layers.moe.expert_bias import while_optimizer_steps

    return while_optimizer_steps(lambda: original(self))


def _forward_step(
    original: Callable[..., Any],
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.utils import get_model_config

    from mt_megatron.layers.moe.router_losses import (
        loss_scale_factor,
        returns_may_be_summed,
        with_own_tokens,
    )

    config = get_model_config(model)
    has_experts = getattr(config, "num_moe_experts", None) is not None
    if has_experts and returns_may_be_summed(config):
        forward_step_func = with_own_tokens(forward_step_func, forward_data_store)
    call = (forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store)
    found = original(*call, *args, **kwargs)
    if has_experts:
        factor = loss_scale_factor(config, num_microbatches)
        if factor != 1:
            MoEAuxLossAutoScaler.set_loss_scale(MoEAuxLossAutoScaler.main_loss_backward_scale * factor)
    return found


_ROUTER = "megatron.core.transformer.moe.router:"
_UTILS = "megatron.core.transformer.moe.moe_utils:"
_OPTIMIZER = "megatron.core.optimizer.optimizer:"


def patches(backend: Backend) -> list[Patch]:
    def wrap(id: str, target: str, body: Callable[..., Any], reason: str, digest: str) -> Patch:
        return Patch(
            id=f"router.{id}",
            target=target,
            kind="wrap",
            feature="moe",
            reason=reason,
            body=body,
            digest=digest,
        )

    def replace(id: str, target: str, body: Callable[..., Any], reason: str, digest: str) -> Patch:
        return Patch(
            id=f"router.{id}",
            target=target,
            kind="replace",
            feature="moe",
            reason=reason,
            body=body,
            digest=digest,
        )

    def reduce_tracker() -> None:
        from mt_megatron.layers.moe.router_losses import reduce_across_ranks

        reduce_across_ranks(backend.device(backend.current_device()))

    def step(optimizer: str, digest: str) -> Patch:
        return wrap(
            f"step_{optimizer}",
            f"{_OPTIMIZER}{optimizer}.step",
            _optimizer_step,
            "the experts' bias moves once per update, and not when the update was skipped",
            digest,
        )

    return [
        wrap(
            "init",
            f"{_ROUTER}TopKRouter.__init__",
            _init,
            "a router may have a bias per expert, and counts tokens for it",
            "13aba691c58fadc3ce21ac504ef36460fdc513db5675f37520d4fea538c6b3a7",
        ),
        Patch(
            id="router.apply",
            target=f"{_ROUTER}TopKRouter._apply",
            kind="add",
            feature="moe",
            reason="casting a model to bf16 would cast the bias, which moves by less than bf16 resolves",
            body=_apply,
        ),
        wrap(
            "gating",
            f"{_ROUTER}Router.gating",
            _gating,
            "moe_router_dtype: logits in fp32 of a model in bf16",
            "43c14e668d67a17e36b6160ead66d304a1bf343bf2a2a6c7415bcac54d1a7a7c",
        ),
        replace(
            "apply_input_jitter",
            f"{_ROUTER}TopKRouter.apply_input_jitter",
            _apply_input_jitter,
            "validation draws noise as well, so that resuming is not exact; fp32 noise makes bf16 input fp32",
            "39a0811d1b321602fc994c9dad9fb59451de1ccc16781f5fe2b47285cd90e909",
        ),
        wrap(
            "forward",
            f"{_ROUTER}TopKRouter.forward",
            _forward,
            "it forgets which tokens are of one sequence, and does not know a recomputed pass from a first",
            "969ba9c38cc5a4336ebab0a5d281c6be4e122499857cd19c88f5a1ebd4a71b4a",
        ),
        wrap(
            "routing",
            f"{_ROUTER}TopKRouter.routing",
            _routing,
            "it has no loss per sequence, and knows softmax alone",
            "7422e734521d7ee8ea4fa1558ad141651dfd585012b6d0256e8ca25193a99489",
        ),
        wrap(
            "aux_loss_load_balancing",
            f"{_ROUTER}TopKRouter.aux_loss_load_balancing",
            _aux_loss,
            "its loss is of a softmax whatever the scores are",
            "50457432d5b74e4ae99ab12a27af7e261791abc5c6e0ab2c5ddf4e058acbf4ce",
        ),
        Patch(
            id="router.seq_aux_loss_load_balancing",
            target=f"{_ROUTER}TopKRouter.seq_aux_loss_load_balancing",
            kind="add",
            feature="moe",
            reason="the balancing loss of each sequence by itself (DeepSeek-V3)",
            body=_seq_aux_loss,
        ),
        wrap(
            "apply_load_balancing_loss",
            f"{_ROUTER}TopKRouter.apply_load_balancing_loss",
            _apply_load_balancing_loss,
            "it logs 0/0 without a coefficient, twice with recomputation, and vanishes with a loss per token",
            "71e04dd85a73ec1726e9840ef5a48d8ab5ce1da2bd477cc5e76f8f024c5ca8fa",
        ),
        wrap(
            "apply_z_loss",
            f"{_ROUTER}TopKRouter.apply_z_loss",
            _apply_z_loss,
            "it is logged twice with recomputation and vanishes with a loss per token",
            "b42f9dcbf53e6a5e41eaffe048da4c3717029c844ded1fd5fb6492364bac1c0d",
        ),
        replace(
            "topk_softmax_with_capacity",
            f"{_UTILS}topk_softmax_with_capacity",
            _topk_softmax_with_capacity,
            "it leaves equal scores, and who is dropped by position, to torch.topk, which promises no order",
            "bee263b5f3bce18075e188da537dda1f95841e880109c291e0580e34ac98eed4",
        ),
        replace(
            "reduce_aux_losses_tracker",
            f"{_UTILS}reduce_aux_losses_tracker_across_ranks",
            reduce_tracker,
            "a pipeline stage without experts tracks nothing and joins in no sum, so the others wait",
            "c9134797cb6908c67560b23c5a8737ba3eea12efc04028b9bf888c5e8316cbc5",
        ),
        wrap(
            "zero_grad_buffer",
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
            _zero_grad_buffer,
            "a step begins: tokens of one that was skipped do not count for the experts' bias",
            "cb16b9747ecd07fe35f1d7f67d3501a9e85c4c4342ad6f81669c9c393901c9c2",
        ),
        step(
            "MixedPrecisionOptimizer",
            "5946ee169e29a9102be5507626bfe7abd8bb4de42f207afa973ebf3e81b51418",
        ),
        step("FP32Optimizer", "5946ee169e29a9102be5507626bfe7abd8bb4de42f207afa973ebf3e81b51418"),
        step("ChainedOptimizer", "0d1eda221dcfc8d71186231b4c4e3d3e69bec9a7d1d9bfd8e23f88a737b0ec42"),
        wrap(
            "forward_step",
            "megatron.core.pipeline_parallel.schedules:forward_step",
            _forward_step,
            "its scale of the routers' losses lacks context parallelism and the loss per token",
            "f8d0c9fa276cb0da7ba4b09f7024f1fb1aaf1b2b8242bbb2e39f0c9207d6d143",
        ),
    ]
