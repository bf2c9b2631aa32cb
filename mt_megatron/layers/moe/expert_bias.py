"""Expert bias: balances the experts' load without a loss; kept in fp32, moved once per applied update.

Source: arXiv:2408.15664 and DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). After every update of the
weights an expert that got more than its share of the step's tokens loses ``moe_router_bias_update_rate``
of its bias, one that got less gains it. Names are Megatron-Core 0.12's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from mt_megatron.layers.moe.router_passes import Passes
from mt_megatron.parallel.group_names import name_of
from mt_megatron.seams import collectives

_found: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()


def add_expert_bias(router: Any) -> None:
    """Give ``router`` its buffers, or None in their place where ``config`` does not ask for a bias.

    ``expert_bias``, float32 [num_experts], is in state dicts; ``local_tokens_per_expert``, int64
    [num_experts], counts what this rank routed since the step began and is not.
    """
    if not router.config.moe_router_enable_expert_bias:
        router.expert_bias = None
        router.local_tokens_per_expert = None
        return
    experts, device = router.config.num_moe_experts, router.weight.device
    router.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32, device=device))
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    router.register_buffer("local_tokens_per_expert", counts, persistent=False)


def kept_in_fp32(router: Any, apply: Callable[[], Any]) -> Any:
    """Run ``apply``, a ``Module._apply`` of ``router``; the bias moves with it and is not cast.

    ``.bfloat16()``, ``.half()`` and Megatron's ``Float16Module`` cast every buffer; a step of 1e-3 is lost
    on a bias in bf16 from 0.5 on.
    """
    before: Tensor | None = getattr(router, "expert_bias", None)
    result = apply()
    if before is not None and router.expert_bias.dtype != torch.float32:
        router.expert_bias = before.to(device=router.expert_bias.device, dtype=torch.float32)
    return result


def routers_of(chunk: torch.nn.Module) -> tuple[Any, ...]:
    """Every router of ``chunk``, wrapped or not, in the order of its modules."""
    found = _found.get(chunk)
    if found is None:
        found = tuple(each for each in chunk.modules() if isinstance(getattr(each, "passes", None), Passes))
        _found[chunk] = found
    return found


def update_expert_bias(chunks: Sequence[torch.nn.Module]) -> None:
    """Move the biases of all routers in ``chunks`` by what was counted since the step began.

    Call it once after an update that was applied, with all chunks of this rank, wrapped or not;
    collective over the ranks that hold the same layers (tensor x data x context parallel), in one
    all-reduce of int64 [routers, num_experts]. A stage without such a router does nothing. Other stages
    and other experts' ranks are never waited for. The counts begin anew.
    """
    _step.chunks = [each for each in _step.chunks if not any(each() is chunk for chunk in (*chunks, None))]
    routers = [router for chunk in chunks for router in routers_of(chunk) if router.enable_expert_bias]
    if not routers:
        return
    with torch.no_grad():
        counts = torch.stack([router.local_tokens_per_expert for router in routers])
        _sum_over_copies(counts)
        for router, of_layer in zip(routers, counts, strict=True):
            # In whole numbers: a load that is exactly even moves nothing.
            short = of_layer.sum() - of_layer * of_layer.numel()
            router.expert_bias.add_(short.sign(), alpha=router.config.moe_router_bias_update_rate)
            router.local_tokens_per_expert.zero_()


def _sum_over_copies(counts: Tensor) -> None:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if torch.distributed.get_world_size(group) > 1:
        with collectives.announced("all_reduce", name_of(group), group, counts):
            torch.distributed.all_reduce(counts, group=group)


class _Step:
    """The step that a training script is in; scripts call nothing of ours."""

    def __init__(self) -> None:
        self.chunks: list[ReferenceType[torch.nn.Module]] = []
        self.depth = 0


_step = _Step()


def step_begins(chunk: torch.nn.Module) -> None:
    """The gradients of ``chunk`` are zeroed: what its routers counted is of another step, which was
    skipped, or of none."""
    biased = False
    for router in routers_of(chunk):
        router.passes.forget()
        if router.enable_expert_bias:
            router.local_tokens_per_expert.zero_()
            biased = True
    if biased and not any(each() is chunk for each in _step.chunks):
        _step.chunks.append(ref(chunk))


def while_optimizer_steps(step: Callable[[], Any]) -> Any:
    """Run ``step`` of a Megatron optimizer; when it is the outermost one and was applied, the biases of
    the chunks whose step began are moved."""
    _step.depth += 1
    try:
        result = step()
    finally:
        _step.depth -= 1
    if _step.depth == 0 and result[0]:
        update_expert_bias([chunk for each in _step.chunks if (chunk := each()) is not None])
    return result
