"""One order of the optimizer's parameter groups on all pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def _order(group: dict[str, Any]) -> tuple[Any, ...]:
    """Embeddings with a rate of their own, then matrices, then what has no weight decay, then
    experts: the order that the first stage of a usual model has by itself."""
    return (
        group["is_expert_parallel"],
        -group["wd_mult"],
        not group["is_decoupled_lr"],
        -group["lr_mult"],
    )


def _in_one_order(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return sorted(original(*args, **kwargs), key=_order)


def patches(backend: Backend) -> list[Patch]:
    """For every backend."""
    return [
        Patch(
            id="optimizer.group_order",
            target="megatron.core.optimizer:_get_param_groups",
            kind="wrap",
            feature="optimizer",
            reason="groups come in the order of a stage's first parameters, and a distributed checkpoint "
            "holds rank 0's: resuming swaps weight decay on stages that begin with a norm",
            body=_in_one_order,
            digest="0e9933627b063f5e5e03f9d1d12866de5f651a9ffb8445a512ef459b42ffe115",
        )
    ]
