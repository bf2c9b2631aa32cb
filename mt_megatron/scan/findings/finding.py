"""What a diagnosis says: who, what, when, how sure, and on what evidence."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Cause = Literal[
    "slow_compute",
    "host_contention",
    "host_pause",
    "slow_data",
    "slow_checkpoint",
    "uneven_work",
    "slow_link",
    "slow_group",
    "slow_node_link",
    "hang",
    "unknown",
]
"""``slow_compute``: the same work takes this rank longer, with no sign of the host's doing.
``host_contention``: its threads wait for a processor (competing load, quota, steal). ``host_pause``: the
whole process stood still (stopped, garbage collection). ``slow_data``: it waits for its batches.
``slow_checkpoint``: its checkpoint takes longer. ``uneven_work``: it has more to do (tokens, experts) and
does it at the others' speed. ``slow_link``: transfers between one pair of ranks; ``slow_group``: one group,
no pair stands out; ``slow_node_link``: all pairs across one node's border. ``hang``: nothing ends."""

SURE = 0.5
"""Least confidence of a claim. Below it a finding is a weak signal: its cause is ``unknown``, it sets no exit
code, and nobody is told of it while the run trains. (0.5: the finding is right more often than not.)"""

Lateness = Literal["late_arrival", "slow_transfer", "hang", "unknown"]


def steps_text(first: int, last: int) -> str:
    """``step 40`` or ``steps 40-80``."""
    return f"step {first}" if first == last else f"steps {first}-{last}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One culprit."""

    cause: Cause
    lateness: Lateness
    ranks: tuple[int, ...] = ()
    """Global ranks at fault: one for a slow rank, two for a link, a group's or a node's for those. None where
    the whole run was slower (``whole_run``), and of a hang that no record explains."""

    group: str | None = None
    """``tp``, ``dp`` ...: the group in which it was seen, for a link, a group or a hang."""

    host: str | None = None
    first_step: int
    last_step: int
    lost_fraction: float
    """Of the time of those steps, what the fault costs the run."""

    confidence: float
    """0 to 1; below ``SURE`` the cause is ``unknown``."""

    evidence: tuple[str, ...] = ()
    """Sentences with the figures that speak for it (and against other causes)."""

    advice: str = ""
    """What to do next."""

    details: dict[str, Any] = field(default_factory=dict)
    """Figures for programs; a hang's collective, sequence number and Python stack."""

    @property
    def is_claim(self) -> bool:
        """Whether it says what is so, and not only what may be. A hang is a fact, whoever is to blame."""
        return self.confidence >= SURE or self.cause == "hang"

    @property
    def whole_run(self) -> bool:
        """Whether all ranks were slower alike, so that it names none of them."""
        return bool(self.details.get("whole_run"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
