"""Which findings of a run that is judged again and again are news, and which steps they spoil for the rest.

The same steps are looked at many times, each time with a few more: what was told is not told again, what
begins anew is, and what only one look sees is chance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mt_megatron.scan.findings.finding import Finding

WORTH_AN_ALERT = 0.6
"""Above ``finding.SURE``, from which a report claims something: a person who is interrupted wants fewer
false alarms than a person who reads a report."""

LEAST_LOST = 0.03
"""Of the time: what costs less wakes nobody. (Checkpoints are rare and cost little on average.)"""

LEAST_STOP_MS = 1000.0
"""A single stop that was shorter is over and forgotten."""

AT_ONCE = 0.9
"""A finding less sure than this is told when the next look confirms it."""

WORSE = 3.0
WORTH_TELLING = 0.05
"""What was told is told again when it costs so many times as much, and so much of the step at least."""

OVER = 4
"""Steps after its last one from which on a fault is over: what is seen later is another one."""

RECENT = 8
"""A fault whose last step is further back is history: the report has it, nobody is alerted."""

Key = tuple[object, ...]


@dataclass(frozen=True)
class _Told:
    first: int
    last: int
    lost: float


class Telling:
    """What was said so far in one session of a run."""

    def __init__(self) -> None:
        self._told: dict[Key, _Told] = {}
        self._over: list[_Told] = []
        self._candidates: set[Key] = set()
        self._hung: int | None = None

    def hang(self, finding: Finding) -> list[Finding]:
        """``finding`` if somebody has to hear of it now: one of each step, for when it goes on those that
        waited look for a moment like the ones that are waited for."""
        if self._hung is not None and finding.first_step <= self._hung + 1:
            return []
        self._hung = finding.first_step
        return [finding]

    def news(self, found: Iterable[Finding], *, step: int, sure: bool) -> list[Finding]:
        """Those of ``found`` that somebody has to hear now; ``step`` is the last one judged.

        ``sure``: nobody will look again.
        """
        told: list[Finding] = []
        seen: set[Key] = set()
        for each in found:
            if each.cause == "unknown" or each.confidence < WORTH_AN_ALERT:
                continue
            if _trifle(each):
                continue
            key: Key = (each.cause, each.ranks)
            since = int(each.details.get("since", each.first_step))
            known = self._told.get(key)
            again = known is not None and since > known.last + OVER
            if known is not None and not again and each.lost_fraction < _worse(known):
                # The same, still there. One that begins after its end, or costs far more, is another.
                self._told[key] = replace(known, last=max(known.last, each.last_step))
                continue
            if each.last_step < step - RECENT:
                continue
            seen.add(key)
            if sure or each.confidence >= AT_ONCE or key in self._candidates:
                if known is not None and again:
                    self._over.append(known)
                self._told[key] = _Told(since, each.last_step, each.lost_fraction)
                told.append(each)
        if not sure:
            self._candidates = seen
        return told

    def over(self, step: int) -> list[tuple[int, int]]:
        """First and last steps of what was told and is over at ``step``: they say nothing of what is
        usual."""
        ended = [each for each in self._told.values() if each.last < step - OVER]
        return [(each.first - 1, each.last + 1) for each in (*self._over, *ended)]


def _trifle(finding: Finding) -> bool:
    once = finding.cause == "host_pause" and finding.first_step == finding.last_step
    if once and finding.details.get("longest_ms", LEAST_STOP_MS) < LEAST_STOP_MS:
        return True
    return finding.lost_fraction < LEAST_LOST and finding.cause != "slow_checkpoint"


def _worse(known: _Told) -> float:
    return max(WORSE * known.lost, WORTH_TELLING)
