"""The same parameter groups of the optimizer on all pipeline stages, in one order.

Upstream makes a group where a stage has parameters for it: a stage of the embedding alone has no norms,
one in the middle no embedding with a rate of its own. A checkpoint holds the first stage's groups, and a
stage with another number of them cannot load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


_completes = False


@contextmanager
def same_on_all_stages() -> Iterator[None]:
    """Within it optimizers get the groups of all stages; every rank of a pipeline makes its optimizer there.

    The trainer's, whose checkpoints hold one stage's groups for all. Files of a script hold each rank's own
    groups, and those of before have no empty ones.
    """
    global _completes
    before, _completes = _completes, True
    try:
        yield
    finally:
        _completes = before


def _alike(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    groups = original(*args, **kwargs)
    for pipeline in _pipelines() if _completes else ():
        groups = _completed(groups, _of_all_stages(groups, pipeline))
    return sorted(groups, key=_order)


def _pipelines() -> list[Any]:
    """Process groups of more than one stage that this process is in; none without process groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized() or not parallel_state.model_parallel_is_initialized():
        return []
    found = parallel_state.get_pipeline_model_parallel_group()
    return [each for each in (found if isinstance(found, list) else [found]) if dist.get_world_size(each) > 1]


def _of_all_stages(groups: list[dict[str, Any]], pipeline: Any) -> list[dict[str, Any]]:
    """The settings of each stage's groups, without parameters; collective."""
    import torch.distributed as dist

    from mt_megatron.seams import collectives

    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    stages: list[Any] = [None] * dist.get_world_size(pipeline)
    with collectives.announced("all_gather_object", "pipeline", pipeline):
        dist.all_gather_object(stages, own, group=pipeline)
    return [settings for stage in stages for settings in stage]


def _completed(groups: list[dict[str, Any]], stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``groups`` and an empty one for each that only other stages have."""
    missing = {_order(settings): settings for settings in stages}
    for group in groups:
        missing.pop(_order(group), None)
    return [*groups, *({**settings, "params": []} for settings in missing.values())]


def patches(backend: Backend) -> list[Patch]:
    """For every backend."""
    return [
        Patch(
            id="optimizer.group_order",
            target="megatron.core.optimizer:_get_param_groups",
            kind="wrap",
            feature="optimizer",
            reason="groups come in the order of a stage's first parameters and only where it has some, and a "
            "distributed checkpoint holds rank 0's: resuming swaps weight decay on stages that begin with a "
            "norm, and fails on stages with another number of groups",
            body=_alike,
            digest="0e9933627b063f5e5e03f9d1d12866de5f651a9ffb8445a512ef459b42ffe115",
        )
    ]
