"""What a simulated run says of itself and of each of its ranks, and that it is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mt_megatron.scan.format.segments import Group

from .job import Job
from .layout import Layout

STARTED_UNIX_NS = 1_767_225_600_000_000_000
"""When simulated runs say that they began: the same always, so that equal seeds make equal files."""


def run_facts(job: Job) -> dict[str, Any]:
    """For ``run.json``."""
    layout = job.layout
    return {
        "simulated": True,
        "world_size": layout.world_size,
        "layout": {axis: getattr(layout, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "vpp")},
        "num_microbatches": job.microbatches,
        "started_unix_ns": STARTED_UNIX_NS,
        "model": {"layers": job.layers * layout.pp * layout.vpp},
        "ranks": [{"rank": rank, **_where(layout, rank)} for rank in range(layout.world_size)],
    }


def rank_facts(layout: Layout, rank: int, shown: int) -> dict[str, Any]:
    """For the first note of each of a rank's files; its clock showed ``shown`` (ns) at the beginning."""
    where = _where(layout, rank)
    return {
        "rank": rank,
        **where,
        "pid": 1000 + rank,
        "boot_id": f"simulated-{where['host']}",
        "clock": "simulated",
        "session": 0,
        "simulated": True,
        "threads": {"0": "MainThread"},
        "monotonic_ns": shown,
        "unix_ns": STARTED_UNIX_NS,
        "within_ns": 200,
    }


def group_tables(layout: Layout, names: Sequence[str]) -> list[dict[int, Group]]:
    """Of each rank: its groups of more than one, by the number that their kind has in all files."""
    made: list[dict[int, Group]] = [{} for _ in range(layout.world_size)]
    for number, name in enumerate(names, 1):
        for row in layout.members(name).tolist():
            group = Group(name=name, ranks=tuple(row))
            for rank in row if len(row) > 1 else ():
                made[rank][number] = group
    return made


def _where(layout: Layout, rank: int) -> dict[str, Any]:
    host = layout.host_of(rank)
    return {"host": layout.host_name(host), "node": host, **layout.coordinates(rank)}
