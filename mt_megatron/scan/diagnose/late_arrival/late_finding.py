"""The finding that one rank comes late: what all its causes say alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.findings.finding import Cause, Finding


def late_arrival(
    table: StepTable,
    row: int,
    start: int,
    stop: int,
    *,
    cause: Cause,
    lost_fraction: float,
    confidence: float,
    evidence: Iterable[str],
    details: Mapping[str, Any] | None = None,
) -> Finding:
    """That the rank in ``row`` comes late at the positions ``start`` to ``stop - 1`` of ``table``.

    ``lost_fraction`` is what was measured; the finding keeps it between 0 and 1.
    """
    rank = table.ranks[row]
    first, last = table.steps(start, stop)
    return Finding(
        cause=cause,
        lateness="late_arrival",
        ranks=(rank,),
        host=table.host(rank),
        first_step=first,
        last_step=last,
        lost_fraction=min(max(float(lost_fraction), 0.0), 1.0),
        confidence=round(float(confidence), 3),
        evidence=tuple(evidence),
        details=dict(details or {}),
    )
