"""An optimizer's state as of its first update, also before there was one.

Optimizers make the state of a parameter in their first update, and Megatron-Core makes what it loads into
for Adam alone. A checkpoint from before the first applied update (fp16 looks for its loss scale) would
lack what a later one has, and none of SGD could be loaded.
"""

from __future__ import annotations

from typing import Any

import torch


def complete(optimizer: Any) -> None:
    """Give every parameter of a Megatron optimizer the state of no update, where it has none yet.

    The next update is the same with it and without it, to the bit.
    """
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = part.optimizer
        # Megatron-Core calls this before it loads, and has None there for SGD.
        part.init_state_fn = _complete
        _complete(inner)


def _complete(inner: torch.optim.Optimizer) -> None:
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state.get(parameter):
                initial = _initial(inner, group, parameter)
                if initial:
                    inner.state[parameter] = initial
    if not any(group["params"] for group in inner.param_groups):
        # It has no state to count updates in, and its groups do so instead.
        for group in inner.param_groups:
            group.setdefault("step", 0.0)


def _initial(inner: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    from megatron.core.optimizer import distrib_optimizer

    if isinstance(inner, torch.optim.SGD):
        # A first update makes the buffer a copy of the gradient, which is what momentum * 0 + gradient is.
        return {"momentum_buffer": torch.zeros_like(parameter.data)} if group["momentum"] else {}
    state: dict[str, Any] = {
        "exp_avg": torch.zeros_like(parameter.data),
        "exp_avg_sq": torch.zeros_like(parameter.data),
    }
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        # Apex and Transformer Engine count in the groups. Fused kernels count on the device.
        on = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=on)
    return state
