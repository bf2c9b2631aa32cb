"""Collectives that were begun and have not ended, as torch's Flight Recorder knows them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A collective or transfer that was begun and has not come to its end."""

    op: str
    group: str
    number: int
    """Which one of its group this is, counted from 1; 0 where nobody counts."""

    ranks: list[int]
    """Ranks of the group; empty where that is not known."""

    sizes: str

    def text(self) -> str:
        """The collective in words."""
        number = f" number {self.number}" if self.number else ""
        ranks = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        group = f" in group {self.group}{ranks}" if self.group else ""
        return f"{self.op}{number}{group}{' on ' + self.sizes if self.sizes else ''}"


def waiting_collectives() -> tuple[list[Waiting], dict[str, int]]:
    """What has not ended, and the number of the last collective of each group; nothing where the
    library keeps no record (Gloo before torch 2.13). From any thread."""
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    dump: Any = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return [], {}
    try:
        entries = json.loads(dump(True, False)).get("entries", [])
    except (ValueError, RuntimeError):
        return [], {}
    names: dict[str, Any] = {
        str(name): group for group, name in dist.distributed_c10d._world.pg_names.items()
    }
    waiting: list[Waiting] = []
    entered: dict[str, int] = {}
    for entry in entries:
        group = str(entry["process_group"][0])
        number = int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"])
        if not entry["is_p2p"]:
            entered[group] = max(entered.get(group, 0), number)
        if entry["retired"] or entry["state"] == "completed":
            continue
        known = names.get(group)
        ranks = [] if known is None or entry["is_p2p"] else dist.get_process_group_ranks(known)
        shapes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
        sizes = ", ".join(f"{dtype} {size}" for dtype, size in shapes)
        waiting.append(
            Waiting(op=entry["profiling_name"], group=group, number=number, ranks=ranks, sizes=sizes)
        )
    return waiting, entered
