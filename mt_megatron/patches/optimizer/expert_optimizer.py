"""Under expert parallelism every rank has an optimizer for experts, also where its stage has none.

Upstream makes that optimizer only where there are such parameters. Its gradient norm is summed over
all stages and a checkpoint holds the first stage's structure, so the stages without experts (dense
first layers, most of all) would be waited for, and would decide what the others find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_OPTIMIZER = "megatron.core.optimizer"


def _param_groups(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.core import parallel_state

    groups = original(*args, **kwargs)
    if parallel_state.get_expert_model_parallel_world_size() <= 1:  # 0 without process groups
        return groups
    if any(group["is_expert_parallel"] for group in groups):
        return groups
    like = next((group for group in groups if not group["is_decoupled_lr"]), None)
    return groups if like is None else [*groups, _no_experts(like)]


def _no_experts(like: dict[str, Any]) -> dict[str, Any]:
    return {**like, "params": [], "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": True}


def _optimizer(
    original: Callable[..., Any],
    config: Any,
    model_chunks: Any,
    param_groups: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    made = original(config, model_chunks, param_groups, *args, **kwargs)
    # The distributed optimizer counts by itself (patches/optimizer/fused_adam.py).
    if not config.use_distributed_optimizer and not any(group["params"] for group in param_groups):
        made.optimizer.register_step_post_hook(_count_step)
    return made


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["step"] = group.get("step", 0.0) + 1.0


def _common_step(original: Callable[..., Any], state_dict: Any) -> Any:
    found = original(state_dict)
    counted = [group["step"] for group in state_dict["param_groups"] if "step" in group]
    if found is not None or not counted:
        return found
    import torch

    return torch.tensor(float(counted[0]), dtype=torch.float32)


def patches(backend: Backend) -> list[Patch]:
    """For every backend."""
    return [
        Patch(
            id="expert_optimizer.groups",
            target=f"{_OPTIMIZER}:_get_param_groups",
            kind="wrap",
            feature="moe",
            reason="a stage without experts has no optimizer for them, and the others wait for its norm",
            body=_param_groups,
            digest="0e9933627b063f5e5e03f9d1d12866de5f651a9ffb8445a512ef459b42ffe115",
        ),
        Patch(
            id="expert_optimizer.steps",
            target=f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups",
            kind="wrap",
            feature="moe",
            reason="an optimizer without parameters has no state to count its steps in",
            body=_optimizer,
            digest="59fe38ee9291730ad3d6ca3224084b086f3ed6e88448d272a39404513300c9bd",
        ),
        Patch(
            id="expert_optimizer.common_step",
            target=f"{_OPTIMIZER}.optimizer:MegatronOptimizer._extract_common_per_param_step",
            kind="wrap",
            feature="moe",
            reason="a checkpoint holds the first stage's number of steps, also where it has no experts",
            body=_common_step,
            digest="7a011fb9fff7e445fad97108c22cf005207e3abbc4080db62d38fec8c6d430be",
        ),
    ]
