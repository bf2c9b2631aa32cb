"""Upstream's tracker of routers' losses, summed over ranks of which some have no router."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.parallel.group_names import name_of
from mt_megatron.seams import collectives


def reduce_across_ranks(device: torch.device) -> None:
    """What upstream's ``reduce_aux_losses_tracker_across_ranks`` is for; every rank must call it.

    First over the ranks of a stage, which track the same losses, then over the stages, which may not:
    they agree on the names before anybody waits for a sum. A stage that tracked nothing gets the others'
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
    said: list[Any] = [None] * stages
    own = {name: len(each["values"]) for name, each in tracker.items()}
    with collectives.announced("all_gather_object", name_of(group), group):
        dist.all_gather_object(said, own, group=group)
    sizes: dict[str, int] = {name: size for each in said for name, size in each.items()}
    for name in sorted(sizes):
        if name not in tracker:
            tracker[name] = {"values": torch.zeros(sizes[name], device=device)}
        _sum(tracker[name]["values"], group)


def _sum(values: torch.Tensor, group: Any) -> None:
    with collectives.announced("all_reduce", name_of(group), group, values):
        dist.all_reduce(values, group=group)
