"""Every generator by name."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError
from ..actions import Placement, Schedule
from ..simulate.costs import Costs
from ..simulate.program import Program
from ..validate import validate
from . import looping, v_shape, zero_bubble
from .capped import capped

NAMES = {
    "1f1b": "Megatron-Core's schedule of one chunk per rank",
    "interleaved": "Megatron-Core's schedule of several chunks per rank",
    "breadth_first": "all micro-batches through a chunk before the next (BFC): gradients early, most memory",
    "depth_first": "few micro-batches through all chunks before the next (DFC): least memory",
    "hybrid": "depth-first over groups of K micro-batches, breadth-first inside a group",
    "memory_capped": "the fastest in simulation of several orders that keep CAP activations per rank",
    "zb_h1": "1F1B with deferred weight gradients and the memory of 1F1B",
    "zbv": "two chunks in a V, weight gradients deferred: no bubble where F, B and W take equal times",
    "dualpipev": "two chunks in a V, a forward beside each backward (DualPipe cut in half)",
}
"""Name -> one line about it."""

SHORT_NAMES = {"bfc": "breadth_first", "dfc": "depth_first"}
"""Names that MegatronApp's MegaDPP has for these schedules -> names here."""


V_SHAPED = ("zbv", "dualpipev")
"""Names of the schedules over the V placement; the others are over Megatron-Core's."""


def generate(
    name: str,
    *,
    ranks: int,
    chunks: int | None = None,
    microbatches: int,
    group: int | None = None,
    cap: int | Sequence[int] | None = None,
    split: bool = False,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule called ``name`` of ``ranks`` pipeline ranks with ``chunks`` model chunks each (None: 2 in
    a V, otherwise 1).

    ``group``: micro-batches that go through a chunk before the next chunk follows (hybrid: needed;
    interleaved, depth_first, zb_h1: as many as ranks). ``cap``, ``split`` and ``costs`` are options of
    memory_capped: activations (micro-batches of one chunk) that every rank, or each, may keep; whether weight
    gradients are split off; the costs by which it is simulated (None: F 1, whole B 2, W 1, links without
    delay). Raises ConfigError for an unknown name, an option
    that the schedule has no use for, and sizes that it cannot have.
    """
    if name not in NAMES:
        raise ConfigError(f"found the pipeline schedule {name!r}; expected one of {', '.join(NAMES)}")
    if chunks is None:
        chunks = 2 if name in V_SHAPED else 1
    for what, size in (("ranks", ranks), ("chunks", chunks), ("micro-batches", microbatches)):
        if size < 1:
            raise ConfigError(f"found {size} {what}; expected at least 1")
    if name != "memory_capped" and (cap is not None or split or costs is not None):
        raise ConfigError(f"found cap, split or costs with {name}; they are options of memory_capped")
    if name in V_SHAPED:
        return _v_shaped(name, ranks, chunks, microbatches, group)
    placement = Placement(ranks, chunks)
    if name == "memory_capped":
        if cap is None:
            raise ConfigError("found no cap with memory_capped; expected cap=N, activations of one chunk")
        return fastest_capped(placement, microbatches, cap, group=group, split=split, costs=costs)
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
        made = looping.interleaved(placement, microbatches, group)
        if group is not None and validate(made):
            sizes = [
                size
                for size in range(1, microbatches + 1)
                if microbatches % size == 0
                and not validate(looping.interleaved(placement, microbatches, size))
            ]
            raise ConfigError(
                f"found group={group} with interleaved on {ranks} ranks of {chunks} chunks: ranks would wait "
                f"for each other for ever; of {microbatches} micro-batches expected one of "
                f"{', '.join(map(str, sizes)) or 'none'}, or depth_first, which takes any size"
            )
        return made
    if name == "breadth_first":
        return looping.breadth_first(placement, microbatches)
    if name == "depth_first":
        return looping.depth_first(placement, microbatches, around, name)
    if name == "hybrid":
        if group is None:
            raise ConfigError("found no group size with hybrid; expected group=K, micro-batches of a group")
        return looping.depth_first(placement, microbatches, around, name)
    return zero_bubble.zb_h1(placement, microbatches, around)


def fastest_capped(
    placement: Placement,
    microbatches: int,
    cap: int | Sequence[int],
    *,
    group: int | None = None,
    split: bool = False,
    costs: Costs | None = None,
) -> Schedule:
    """The fastest, by simulation with ``costs``, of the list schedules that keep ``cap``: with groups (of
    ``group`` micro-batches, or of as many as ranks and twice as many) and without, taking turns and backwards
    first. The first of equals. Raises ConfigError as ``generate``."""
    costs = costs or Costs(forward=1.0, backward=2.0, weight=1.0)
    caps = [cap] * placement.ranks if isinstance(cap, int) else list(cap)
    if len(caps) != placement.ranks:
        raise ConfigError(
            f"found caps of {len(caps)} ranks; expected one number, or one for each of {placement.ranks}"
        )
    most = microbatches if placement.chunks == 1 else (min(caps) - 1) // (placement.chunks - 1)
    sizes: list[int | None] = [group]
    if group is None and placement.chunks == 1:
        sizes = [microbatches]
    elif group is None:
        usual = {min(microbatches, most, times * placement.ranks) for times in (1, 2)}
        sizes = [*sorted(size for size in usual if size), None]
    fastest: tuple[float, Schedule] | None = None
    for size in sizes:
        for turns in (True, False):
            made = capped(placement, microbatches, caps, costs=costs, group=size, turns=turns, split=split)
            seconds = Program(made).makespan(costs)
            if fastest is None or seconds < fastest[0]:
                fastest = seconds, made
    assert fastest is not None
    return fastest[1]


def _v_shaped(name: str, ranks: int, chunks: int, microbatches: int, group: int | None) -> Schedule:
    if chunks != 2:
        raise ConfigError(
            f"found {chunks} chunks per rank with {name}; expected 2, which the V placement has"
        )
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
