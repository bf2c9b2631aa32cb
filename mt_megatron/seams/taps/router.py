"""Logits, scores and choices of an expert router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mt_megatron.errors import ConfigError
from mt_megatron.seams.taps.modules import Call, Watch, watch


@dataclass(frozen=True, kw_only=True)
class RouterScores:
    """Decisions of one call of a router. Tensors are detached and share the run's memory."""

    call: Call

    logits: Tensor
    """[tokens, num_experts] of this rank's tokens, in the order [sequence, batch] flattened."""

    weights: Tensor
    """[tokens, topk]: what the chosen experts' outputs are multiplied with; 0 where an assignment was dropped
    by the experts' capacity. [num_experts, capacity] where experts are ``padded``."""

    experts: Tensor
    """int64 [tokens, topk], numbers of the chosen experts; the largest int64 for what was dropped. Where
    experts are ``padded``, the tokens of each, [num_experts, capacity]."""

    padded: bool
    """Whether ``weights`` and ``experts`` are by expert: ``moe_pad_expert_input_to_capacity``."""

    tokens: slice
    """This rank's tokens among those that ``padded`` ``experts`` counts: all, or its part of those that the
    tensor parallel ranks have gathered."""

    num_experts: int
    topk: int

    score_function: str
    """``softmax`` or ``sigmoid``."""

    bias: Tensor | None
    """float32 [num_experts], added to the scores for the choice alone (DeepSeek-V3)."""

    def probabilities(self) -> Tensor:
        """float32 [tokens, num_experts]: the scores of all experts, each token's adding up to 1, without bias
        and groups. Computed at every call."""
        if self.score_function == "sigmoid":
            scores = torch.sigmoid(self.logits.float())
            return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return torch.softmax(self.logits, dim=-1, dtype=torch.float32)

    def routing_map(self) -> Tensor:
        """bool [tokens, num_experts]: which experts compute which tokens. Computed at every call."""
        if self.padded:
            # Padding has weight 0.
            taken = self.logits.new_zeros(self.num_experts, self.tokens.stop + 1, dtype=torch.bool)
            last = self.experts.clamp(max=self.tokens.stop)
            return taken.scatter_(1, last, self.weights != 0)[:, self.tokens].t()
        # What was dropped goes to a column that is left out.
        chosen = self.logits.new_zeros(self.logits.size(0), self.num_experts + 1, dtype=torch.bool)
        chosen.scatter_(1, self.experts.clamp(max=self.num_experts), True)
        return chosen[:, :-1]

    def tokens_per_expert(self) -> Tensor:
        """int64 [num_experts], of this rank's tokens. Computed at every call."""
        return self.routing_map().sum(dim=0)


def router_scores(
    module: nn.Module,
    fn: Callable[[RouterScores], None],
    *,
    errors: Literal["close", "raise"] = "close",
    told: Callable[[str], None] | None = None,
) -> Watch:
    """Call ``fn`` at every call of the router of ``module`` (a layer, its MLP, or a router) until the
    returned tap is closed; not for recomputed calls.

    Works for softmax and sigmoid scores, groups, biases, capacities and Sinkhorn. Raises ``ConfigError`` for
    a module without a router.
    """
    router: Any = router_of(module)
    kept: list[Tensor] = []

    def routing(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[:] = [args[0] if args else kwargs["logits"]]

    def routed(call: Call, output: Any) -> None:
        logits = kept.pop()
        fn(_scores(router, call, logits.reshape(-1, router.config.num_moe_experts), *output))

    return watch(router, before=routing, after=routed, errors=errors, told=told, method="routing")


def router_of(module: nn.Module) -> nn.Module:
    """The router of ``module``: itself, its own, or that of its MLP. Raises ``ConfigError``."""
    for found in (
        module,
        getattr(module, "router", None),
        getattr(getattr(module, "mlp", None), "router", None),
    ):
        if isinstance(found, nn.Module) and callable(getattr(found, "routing", None)):
            return found
    raise ConfigError(
        f"found a {type(module).__name__}, which has no router of experts; expected a transformer layer with "
        "experts, its MLP, or a router"
    )


def _scores(router: Any, call: Call, logits: Tensor, weights: Tensor, experts: Tensor) -> RouterScores:
    config = router.config
    padded = bool(config.moe_pad_expert_input_to_capacity and config.moe_expert_capacity_factor is not None)
    tokens = slice(0, logits.size(0))
    if config.moe_token_dispatcher_type == "alltoall_seq":
        # This dispatcher gathers the logits of the tensor parallel ranks: those of this rank are one part.
        tokens = _own_part(logits.size(0))
        if not padded:
            weights, experts = weights[tokens], experts[tokens]
    return RouterScores(
        call=call,
        logits=logits,
        weights=weights,
        experts=experts,
        padded=padded,
        tokens=tokens,
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        score_function=getattr(config, "moe_router_score_function", "softmax"),
        bias=None if getattr(router, "expert_bias", None) is None else router.expert_bias.detach(),
    )


def _own_part(count: int) -> slice:
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    return slice(rank * count, (rank + 1) * count)
