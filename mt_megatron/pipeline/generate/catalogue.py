"""Every generator by name."""

from __future__ import annotations

from ...errors import ConfigError
from ..actions import Placement, Schedule
from . import looping, v_shape, zero_bubble

NAMES = {
    "1f1b": "Megatron-Core's schedule of one chunk per rank",
    "interleaved": "Megatron-Core's schedule of several chunks per rank",
    "breadth_first": "all micro-batches through a chunk before the next (BFC): gradients early, most memory",
    "depth_first": "few micro-batches through all chunks before the next (DFC): least memory",
    "hybrid": "depth-first over groups of K micro-batches, breadth-first inside a group",
    "zb_h1": "1F1B with deferred weight gradients and the memory of 1F1B",
    "zbv": "two chunks in a V, weight gradients deferred: no bubble where F, B and W take equal times",
    "dualpipev": "two chunks in a V, a forward beside each backward (DualPipe cut in half)",
}
"""Name -> one line about it."""


V_SHAPED = ("zbv", "dualpipev")
"""Names of the schedules over the V placement; the others are over Megatron-Core's."""


def generate(
    name: str,
    *,
    ranks: int,
    chunks: int | None = None,
    microbatches: int,
    group: int | None = None,
) -> Schedule:
    """The schedule called ``name`` of ``ranks`` pipeline ranks with ``chunks`` model chunks each (None: 2 in
    a V, otherwise 1).

    ``group``: micro-batches that go through a chunk before the next chunk follows (hybrid: needed;
    interleaved, depth_first, zb_h1: as many as ranks). Raises ConfigError for an unknown name, an option
    that the schedule has no use for, and sizes that it cannot have.
    """
    if name not in NAMES:
        raise ConfigError(f"found the pipeline schedule {name!r}; expected one of {', '.join(NAMES)}")
    if chunks is None:
        chunks = 2 if name in V_SHAPED else 1
    for what, size in (("ranks", ranks), ("chunks", chunks), ("micro-batches", microbatches)):
        if size < 1:
            raise ConfigError(f"found {size} {what}; expected at least 1")
    if name in V_SHAPED:
        return _v_shaped(name, ranks, chunks, microbatches, group)
    placement = Placement(ranks, chunks)
    if group is not None:
        _refuse_group(name, group, microbatches)
    around = min(group or ranks, microbatches)
    if name == "1f1b":
        if chunks != 1:
            raise ConfigError(
                f"found {chunks} chunks per rank with 1f1b, which has one; use interleaved or depth_first"
            )
        return looping.plain(placement, microbatches)
    if name == "interleaved":
        if chunks == 1:
            raise ConfigError(
                "found one chunk per rank with interleaved; expected at least 2 (give "
                "--num-layers-per-virtual-pipeline-stage), or use 1f1b"
            )
        if microbatches % (group or ranks):
            raise ConfigError(
                f"found {microbatches} micro-batches with interleaved on {ranks} ranks; expected a multiple "
                f"of {group or ranks}; use depth_first, which takes any number"
            )
        all_ahead = group is None and microbatches == ranks
        return looping.interleaved(placement, microbatches, around, all_ahead)
    if name == "breadth_first":
        return looping.breadth_first(placement, microbatches)
    if name == "depth_first":
        return looping.depth_first(placement, microbatches, around, name)
    if name == "hybrid":
        if group is None:
            raise ConfigError("found no group size with hybrid; expected group=K, micro-batches of a group")
        return looping.depth_first(placement, microbatches, around, name)
    return zero_bubble.zb_h1(placement, microbatches, around)


def _v_shaped(name: str, ranks: int, chunks: int, microbatches: int, group: int | None) -> Schedule:
    if chunks != 2:
        raise ConfigError(f"found {chunks} chunks per rank with {name}; expected 2, which the V placement has")
    if group is not None:
        raise ConfigError(f"found group={group} with {name}, which has no groups; leave it out")
    if name == "zbv":
        return v_shape.zbv(ranks, microbatches)
    if microbatches < 2 * ranks:
        raise ConfigError(
            f"found {microbatches} micro-batches with dualpipev on {ranks} ranks; expected at least "
            f"{2 * ranks}, two for each rank; use zbv, which takes any number"
        )
    return v_shape.dualpipev(ranks, microbatches)


def _refuse_group(name: str, group: int, microbatches: int) -> None:
    if name in ("1f1b", "breadth_first"):
        raise ConfigError(f"found group={group} with {name}, which has no groups; leave it out")
    if not 1 <= group <= microbatches:
        raise ConfigError(
            f"found groups of {group} micro-batches out of {microbatches}; expected 1 to {microbatches}"
        )
