"""More tokens for one rank's experts, by adding to their scores in every router of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_ROUTER = "TopKRouter"


def skew_routers(ranks: Sequence[int], bias: float) -> Callable[[], None]:
    """Let the routers of this process prefer the experts of ``ranks`` from now on; returns what ends it.

    Nothing happens in a process whose expert-parallel group holds none of ``ranks``, or that has no router.
    """
    import torch
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    members = torch.distributed.get_process_group_ranks(group)
    places = [members.index(rank) for rank in ranks if rank in members]
    size = len(members)
    met: list[Any] = []

    def meet(module: Any, inputs: Any) -> None:
        if type(module).__name__ != _ROUTER or "gating" in module.__dict__:
            return
        gating = module.gating

        def skewed(*args: Any, **kwargs: Any) -> Any:
            logits = gating(*args, **kwargs)
            local = logits.shape[-1] // size
            extra = torch.zeros_like(logits[..., :1]).expand_as(logits).clone()
            for place in places:
                extra[..., place * local : (place + 1) * local] = bias
            return logits + extra

        module.gating = skewed
        met.append(module)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(meet)

    def end() -> None:
        handle.remove()
        for module in met:
            module.__dict__.pop("gating", None)

    return end
