"""What a plan did: a frozen account to read, store beside a checkpoint and compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from ..errors import PatchError
from .plan import Plan, suggest

State = Literal["applied", "pending", "left out", "undone"]


@dataclass(frozen=True, kw_only=True)
class PatchRecord:
    """One patch and what became of it."""

    id: str
    target: str
    kind: str
    feature: str
    reason: str
    state: State
    why: str = ""
    """Why it was left out, or what it waits for."""

    digest: str | None = None
    """sha256 of the installed upstream source; None where the kind needs none."""

    rebound: tuple[str, ...] = ()
    """Places other than the target itself that now see the patched value."""


@dataclass(frozen=True, kw_only=True)
class PatchReport:
    """The state of one plan at the moment of asking."""

    backend: str
    why: str
    """How the backend was chosen."""

    features: tuple[str, ...] | None
    plan_digest: str
    """Equal on two ranks exactly when both apply the same patches to the same sources."""

    patches: tuple[PatchRecord, ...]
    warnings: tuple[str, ...] = ()
    unrebindable: tuple[str, ...] = ()
    """Holders that kept an original (never in strict mode)."""

    @property
    def applied(self) -> tuple[PatchRecord, ...]:
        return self._in("applied")

    @property
    def pending(self) -> tuple[PatchRecord, ...]:
        """Their modules are not imported yet; they are applied when they are."""
        return self._in("pending")

    @property
    def left_out(self) -> tuple[PatchRecord, ...]:
        return self._in("left out")

    def _in(self, state: State) -> tuple[PatchRecord, ...]:
        return tuple(record for record in self.patches if record.state == state)

    def to_json(self) -> str:
        """Everything, as one JSON object with sorted keys."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    def explain(self, patch_id: str) -> str:
        """All that is known about one patch. Raises PatchError for an unknown id."""
        for record in self.patches:
            if record.id == patch_id:
                return _explain(record)
        near = suggest(patch_id, [record.id for record in self.patches])
        raise PatchError(f"no patch has the id {patch_id!r}{near}")

    def summary(self) -> str:
        """One line for a log."""
        parts = [f"{len(self.applied)} applied", f"{len(self.pending)} waiting for their modules"]
        if self.left_out:
            parts.append(f"{len(self.left_out)} left out")
        if self.unrebindable:
            parts.append(f"{len(self.unrebindable)} holders not rebound")
        return (
            f"backend {self.backend} ({self.why}): patches {', '.join(parts)}; plan {self.plan_digest[:12]}"
        )


def _explain(record: PatchRecord) -> str:
    lines = [
        f"{record.id}: {record.state}{f' ({record.why})' if record.why else ''}",
        f"  {record.kind} {record.target}, feature {record.feature}",
        f"  reason: {record.reason}",
    ]
    if record.digest:
        lines.append(f"  upstream digest: {record.digest}")
    lines += [f"  also seen by: {place}" for place in record.rebound]
    return "\n".join(lines)


def make_report(
    plan: Plan,
    states: Mapping[str, tuple[State, str]],
    rebound: Mapping[str, list[str]],
    warnings: tuple[str, ...] = (),
    unrebindable: tuple[str, ...] = (),
) -> PatchReport:
    """Put a plan and what was done with it together; ``states`` maps ids to state and reason."""
    records = []
    for step in plan.steps:
        state, why = states[step.patch.id]
        records.append((step.patch, state, why, step.digest))
    records += [(patch, "left out", why, None) for patch, why in plan.left_out]
    return PatchReport(
        backend=plan.backend,
        why=plan.why,
        features=plan.features,
        plan_digest=plan.digest,
        patches=tuple(
            PatchRecord(
                id=patch.id,
                target=patch.target,
                kind=patch.kind,
                feature=patch.feature,
                reason=patch.reason,
                state=state,
                why=why,
                digest=digest,
                rebound=tuple(rebound.get(patch.id, ())),
            )
            for patch, state, why, digest in records
        ),
        warnings=plan.warnings + warnings,
        unrebindable=unrebindable,
    )
