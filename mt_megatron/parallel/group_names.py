"""What Megatron-Core's process groups are called: by axes, as ``parallel.rank_layout`` names them.

The names are read off ``megatron.core.parallel_state``, which may be somebody else's to fill: nothing here
makes a group.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch.distributed as dist

_HELD_AS = (
    ("tp", "_TENSOR_MODEL_PARALLEL_GROUP"),
    ("dp", "_DATA_PARALLEL_GROUP"),
    ("pp", "_PIPELINE_MODEL_PARALLEL_GROUP"),
    ("cp", "_CONTEXT_PARALLEL_GROUP"),
    ("ep", "_EXPERT_MODEL_PARALLEL_GROUP"),
    ("dp-cp", "_DATA_PARALLEL_GROUP_WITH_CP"),
    ("edp", "_DATA_MODULO_EXPERT_PARALLEL_GROUP"),
    ("edp-cp", "_DATA_MODULO_EXPERT_PARALLEL_GROUP_WITH_CP"),
    ("tp-ep", "_TENSOR_AND_EXPERT_PARALLEL_GROUP"),
    ("tp-pp", "_MODEL_PARALLEL_GROUP"),
    ("tp-ep-pp", "_MODEL_AND_EXPERT_PARALLEL_GROUP"),
    ("tp-cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    ("tp-dp", "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    ("tp-dp-cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    ("embedding", "_EMBEDDING_GROUP"),
    ("position-embedding", "_POSITION_EMBEDDING_GROUP"),
)
"""Name and attribute, in the order in which a group that has several names gets its first."""


NAMES = tuple(name for name, _ in _HELD_AS)


def megatron_groups() -> dict[str, Any]:
    """Name -> process group of every group that Megatron-Core has made and this rank is in; empty before."""
    state = sys.modules.get("megatron.core.parallel_state")
    held = {} if state is None else vars(state)
    found = {name: held.get(attribute) for name, attribute in _HELD_AS}
    # A stage that feeds several decoders holds lists, which have no one name.
    return {name: group for name, group in found.items() if isinstance(group, dist.ProcessGroup)}


def name_of(group: Any) -> str:
    """The first name of a group with these members, the same on all of them; ``world`` for the default
    group (None too), and what its maker called it where its members are none of Megatron's groups."""
    if group is None or group is dist.group.WORLD:
        return "world"
    known = _named.get(id(group))
    if known is not None and known[0]() is group:
        return known[1]
    ranks = dist.get_process_group_ranks(group)
    described = str(getattr(group, "group_desc", "") or "")
    name = described if described not in ("", "undefined") else f"group {group.group_name}"
    for each, held in megatron_groups().items():
        # Members decide: libraries differ in whether equal groups are one object.
        if dist.get_process_group_ranks(held) == ranks:
            name = each
            break
    _named[id(group)] = (weakref.ref(group), name)
    return name


# By identity, as groups do not live for ever; the reference tells a new one at an old one's address.
_named: dict[int, tuple[weakref.ref[Any], str]] = {}
