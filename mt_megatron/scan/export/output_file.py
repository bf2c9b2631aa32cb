"""What the exports share: what was written, the title of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mt_megatron.scan.analysis.trace import Trace
from mt_megatron.scan.findings.text import place_text


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    events: int
    ranks: int
    bytes: int


def rank_title(trace: Trace, rank: int) -> str:
    """``rank 5 (dp 1 pp 0 tp 1) node-3``, and whether it is simulated."""
    place = trace.places.get(rank)
    simulated = " simulated" if trace.simulated else ""
    if place is None:
        return f"rank {rank}{simulated}"
    host = f" {place.host}" if place.host else ""
    return f"rank {rank} ({place_text(place)}){host}{simulated}"
