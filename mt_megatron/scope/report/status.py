"""State of a recording, for ``mt-megatron scope status``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mt_megatron.scope.recording.data import AlertRecord, Dropped
from mt_megatron.scope.recording.files import read_requests
from mt_megatron.scope.recording.reader import Recording

SILENT_SECONDS = 30.0
"""Without news a run may have ended or stand still."""

MOST_ALERTS = 5


@dataclass(frozen=True, kw_only=True)
class Status:
    """State of a recording."""

    run: str
    step: int | None
    loss: float
    step_seconds: float
    """Of the last step."""

    silent_seconds: float
    """Since the last step ended, by this machine's clock."""

    world_size: int
    ranks: int
    """That are in the files."""

    ended: int
    """Ranks that said that they end."""

    sessions: int
    nodes: int
    bytes: int
    """Of the files."""

    statistics: int
    last_sample: int | None
    tensors: int
    alerts: tuple[AlertRecord, ...]
    """Of the last start of the training processes, newest first; none of steps that were undone."""

    dropped: tuple[Dropped, ...]
    """Of the last start, a sum for each source and rank."""

    thinned: Mapping[str, int]
    """Steps that retention removed, by kind, of all nodes."""

    requests: tuple[str, ...]
    perturbed: int
    """Steps under a perturbation."""


def status_of(recording: Recording) -> Status:
    """Raises ``ScopeError`` for damaged files and before the first rank has come."""
    facts = recording.facts()
    last = recording.last_step()
    steps = recording.steps(first=max(0, (last or 0) - 200))
    samples = recording.sampled()
    # A session begins wherever the run goes back or makes a step beside itself; a start may have many.
    start = {each.number: each for each in facts.sessions if each.name == facts.session.name}
    thinned: dict[str, int] = {}
    for each in recording.thinned():
        thinned[each.kind] = thinned.get(each.kind, 0) + each.steps
    newest = [
        each
        for each in recording.alerts()
        if each.session in start and start[each.session].is_current(each.step)
    ]
    drops = {(each.source, each.rank): each for each in recording.dropped() if each.session in start}
    there = len(steps.step) > 0
    return Status(
        run=str(recording.files.root.resolve().parent),
        step=last,
        loss=float(steps.loss[-1]) if there else math.nan,
        step_seconds=float(steps.seconds[-1]) if there else math.nan,
        silent_seconds=max(0.0, time.time() - int(steps.time_ns[-1]) / 1e9) if there else math.nan,
        world_size=facts.session.world_size,
        ranks=len(facts.ranks),
        ended=sum(each.ended_ns is not None for each in facts.ranks),
        sessions=len(facts.sessions),
        nodes=len({each.node for each in facts.ranks}),
        bytes=sum(node.path.stat().st_size for node in recording.nodes()),
        statistics=len(recording.names()),
        last_sample=samples[-1] if samples else None,
        tensors=len(recording.tensors()),
        alerts=tuple(reversed(newest)),
        dropped=tuple(drops[key] for key in sorted(drops)),
        thinned=thinned,
        requests=tuple(read_requests(recording.files)),
        perturbed=len({step for step, _ in recording.perturbed()}),
    )


def text(status: Status) -> str:
    """For people: the whole in a line, then what is worth one."""
    seconds = f", {status.step_seconds:.3g} s a step" if math.isfinite(status.step_seconds) else ""
    loss = f", loss {status.loss:.4f}" if not math.isnan(status.loss) else ""
    lines = [f"{status.run}: step {'-' if status.step is None else status.step}{loss}{seconds}"]
    ranks = f"{status.ranks} of {status.world_size} ranks recorded on {status.nodes} node"
    lines.append(f"  {ranks}{'s' * (status.nodes != 1)}, {status.bytes / 2**20:.1f} MiB")
    if status.ended == status.ranks:
        lines.append("  all ranks have ended: the run is over")
    elif status.silent_seconds > SILENT_SECONDS:
        lines.append(f"  nothing new for {status.silent_seconds:.0f} s: the run was killed, pauses or hangs")
    if status.ranks < status.world_size:
        lines.append("  values may lack the parts of the ranks that are not recorded")
    sample = "none yet" if status.last_sample is None else f"last at step {status.last_sample}"
    lines.append(f"  {status.statistics} statistics ({sample}), {status.tensors} tensors")
    if status.sessions > 1:
        lines.append(f"  {status.sessions} sessions: the run was resumed, rewound or paired")
    if status.perturbed:
        lines.append(f"  {status.perturbed} steps were under a perturbation")
    for kind, count in status.thinned.items():
        lines.append(f"  retention has removed {kind} of {count} steps")
    for each in status.dropped:
        lines.append(
            f"  {each.frames} frames ({each.bytes / 2**20:.1f} MiB) of rank {each.rank} dropped by the "
            f"{each.source}"
        )
    lines += [f"  asked for: {each}" for each in status.requests]
    lines += [f"alert at step {each.step}: {each.text}" for each in status.alerts[:MOST_ALERTS]]
    if len(status.alerts) > MOST_ALERTS:
        lines.append(f"and {len(status.alerts) - MOST_ALERTS} alerts before: scope report shows all")
    if not status.alerts:
        lines.append("no alerts")
    return "\n".join(lines)


def as_map(status: Status) -> Mapping[str, Any]:
    """For JSON: numbers that are not finite as None."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    found: Mapping[str, Any] = plain(asdict(status))
    return found
