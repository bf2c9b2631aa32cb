"""Why a rank's own work takes longer: a slow processor, a busy host, or a stop.

``usual_wait``: how long the ranks of a run wait for a processor when nothing is wrong; a culprit stands out
from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.robust import Floats, lower_median
from mt_megatron.scan.analysis.step_table import StepTable, excess_over_peers
from mt_megatron.scan.findings.finding import Cause

HOST_SHARE = 0.35
"""Of the lost time, what waits for a processor must explain to be the cause: the waits are of the process's
main thread or of all of them, so that they rarely fit exactly."""

PAUSE_SHARE = 0.5

USED_SHARE = 0.35
"""Of the time that own work on the host's processors lost, what these must have been used longer for: the
same work is slow there only if it takes more of their time."""

FEWEST_PAST = 3

BY_CHANCE = 0.55
"""Trust in what a busy host does to one of its ranks now and then."""
STEAL = 0.05


@dataclass(frozen=True, kw_only=True)
class Why:
    """The cause of lost own work."""

    cause: Cause
    trust: float
    """Factor for the confidence: below 1 where facts are missing or speak against each other."""

    evidence: tuple[str, ...]
    shares: dict[str, float]
    """Of the lost time, what each fact of the host explains."""


def why_slow(
    table: StepTable, row: int, peers: Sequence[int], chosen: NDArray[np.bool_], lost_ns: float
) -> Why:
    """As ``_judged``; on a host whose ranks wait for processors all the time, what is lost must stand out
    from these waits."""
    found = _judged(table, row, peers, chosen, lost_ns)
    at = table.iteration[chosen]
    if not len(at) or not _computes_on_host(table, row, chosen):
        return found
    usual = usual_wait(table, int(at[0]), int(at[-1]))
    if lost_ns >= usual or found.shares["throttled"] >= HOST_SHARE:
        return found
    said = f"ranks of this run usually wait {usual / 1e6:.0f} ms a step for processors: it may be chance"
    return replace(found, trust=min(found.trust, BY_CHANCE), evidence=(*found.evidence, said))


def _judged(
    table: StepTable, row: int, peers: Sequence[int], chosen: NDArray[np.bool_], lost_ns: float
) -> Why:
    """Judge ``lost_ns`` per step of the rank in ``row`` in the steps ``chosen`` by its host's facts.

    Each fact counts as far as it exceeds the peers' in the same steps, or the rank's own in other steps.
    """
    lost = max(lost_ns, 1.0)
    peers = _comparable(table, row, peers, chosen)

    def extra(name: str) -> float:
        return _extra(table.columns[name], row, peers, chosen)

    used = _positive(extra("process_cpu_ns"))
    # Who computes more also queues more on a busy machine: that much is not its host's doing.
    queued = used * _waits_per_work(table, row, peers, chosen)
    waiting, throttled = extra("run_queue_wait_ns") - queued, extra("throttled_ns")
    pause, collecting = extra("pause"), extra("gc_pause_ns")
    steal = extra("steal_fraction")
    known = np.isfinite(table.columns["run_queue_wait_ns"][row, chosen]).any()
    host = _positive(waiting) + _positive(throttled)
    shares = {
        "run_queue": round(_positive(waiting) / lost, 3),
        "throttled": round(_positive(throttled) / lost, 3),
        "pause": round(_positive(pause) / lost, 3),
        "gc": round(_positive(collecting) / lost, 3),
        "processor": round(used / lost, 3),
    }
    stood = max(_positive(pause), _positive(collecting))
    on_host = _computes_on_host(table, row, chosen)
    if host >= HOST_SHARE * lost and host >= 0.5 * stood and not (on_host and used > host):
        said = f"its threads waited {host / 1e6:.1f} ms a step more for a processor"
        if _positive(throttled) > 0.5 * host:
            said = f"its quota of processor time stopped it for {throttled / 1e6:.1f} ms a step"
        return Why(
            cause="host_contention",
            trust=1.0 if host >= 0.6 * lost else 0.9,
            evidence=(f"{said}; its own work took {lost / 1e6:.1f} ms longer",),
            shares=shares,
        )
    if stood >= PAUSE_SHARE * lost and not (on_host and used > stood):
        what = "garbage collection" if _positive(collecting) > 0.7 * stood else "its process"
        return Why(
            cause="host_pause",
            trust=1.0,
            evidence=(
                f"{what} stood still for {stood / 1e6:.1f} ms a step; its own work took {lost / 1e6:.1f} ms "
                "longer",
            ),
            shares=shares,
        )
    if _positive(steal) >= STEAL:
        return Why(
            cause="host_contention",
            trust=0.9,
            evidence=(f"the hypervisor took {100 * steal:.0f} % more of its processors' time",),
            shares=shares,
        )
    if on_host and used < USED_SHARE * lost:
        return _not_running(used, host, lost, shares)
    evidence = ["its host shows no waits for a processor and no stops that explain it"]
    trust = 1.0
    if not known:
        evidence = ["waits for a processor were not recorded: a busy host cannot be told from a slow one"]
        trust = 0.9
    elif host >= 0.6 * HOST_SHARE * lost and not on_host:
        trust = 0.8
        evidence = [f"waits for a processor explain only {100 * host / lost:.0f} % of it"]
    if on_host:
        evidence.append(f"it used {used / 1e6:.1f} ms a step more of its processors' time")
    evidence += _device(table, row, peers, chosen)
    return Why(cause="slow_compute", trust=trust, evidence=tuple(evidence), shares=shares)


def _not_running(used: float, host: float, lost: float, shares: dict[str, float]) -> Why:
    """Own work on the host that took longer without using more of a processor: it was kept from one."""
    said = (
        f"it used only {used / 1e6:.1f} ms a step more of its processors' time; its own work took "
        f"{lost / 1e6:.1f} ms longer"
    )
    if host >= USED_SHARE * lost or (host > 2.0 * used and host >= 0.5 * USED_SHARE * lost):
        return Why(
            cause="host_contention",
            trust=0.8,
            evidence=(said, f"its threads waited {host / 1e6:.1f} ms a step more for one"),
            shares=shares,
        )
    return Why(
        cause="slow_compute",
        trust=0.45,
        evidence=(said, "what kept it from running was not seen"),
        shares=shares,
    )


def _computes_on_host(table: StepTable, row: int, chosen: NDArray[np.bool_]) -> bool:
    """Whether its own work is done by the host's processors, and how much of them it uses is known."""
    on_host = table.columns["on_host"][row, chosen]
    known = np.isfinite(table.columns["process_cpu_ns"][row, chosen]).any()
    return bool(known and np.isfinite(on_host).any() and np.nanmin(on_host) > 0)


def _comparable(table: StepTable, row: int, peers: Sequence[int], chosen: NDArray[np.bool_]) -> Sequence[int]:
    """Of ``peers`` those of the same pipeline stage: another one's head uses what time it likes. All of
    them where the rank's own past cannot say what is usual."""
    stage = table.places[table.ranks[row]].pp
    same = [peer for peer in peers if peer == row or table.places[table.ranks[peer]].pp == stage]
    if any(peer != row for peer in same):
        return same
    past = np.isfinite(table.columns["compute"][row, ~chosen]).sum()
    return same if past >= FEWEST_PAST else peers


def _device(table: StepTable, row: int, peers: Sequence[int], chosen: NDArray[np.bool_]) -> list[str]:
    said = []
    clock = excess_over_peers(table.columns["clock_mhz"], row, peers, chosen)
    if np.isfinite(clock) and clock < 0:
        said.append(f"its clock ran {-clock:.0f} MHz below its peers'")
    if _positive(excess_over_peers(table.columns["throttled"], row, peers, chosen)) > 0.2:
        said.append("its device reported that it throttles")
    heat = excess_over_peers(table.columns["temperature_c"], row, peers, chosen)
    if np.isfinite(heat) and heat > 5:
        said.append(f"it was {heat:.0f} degrees hotter than its peers")
    return said


def _extra(values: Floats, row: int, peers: Sequence[int], chosen: NDArray[np.bool_]) -> float:
    beside = excess_over_peers(values, row, peers, chosen)
    inside, outside = values[row, chosen], values[row, ~chosen]
    inside, outside = inside[np.isfinite(inside)], outside[np.isfinite(outside)]
    past = (
        float(inside.mean() - np.median(outside))
        if len(inside) and len(outside) >= FEWEST_PAST
        else float("nan")
    )
    found = [each for each in (beside, past) if np.isfinite(each)]
    if found:
        return max(found)
    return float(inside.mean()) if len(inside) else float("nan")


def _waits_per_work(table: StepTable, row: int, peers: Sequence[int], chosen: NDArray[np.bool_]) -> float:
    """How long the peers waited for a processor per time that they had one; without peers itself before."""
    others = [peer for peer in peers if peer != row]
    rows, steps = (others, chosen) if others else ([row], ~chosen)
    waited, used = (table.columns[name][rows][:, steps] for name in ("run_queue_wait_ns", "process_cpu_ns"))
    if not np.isfinite(waited).any() or not np.nansum(used) > 0:
        return 0.0
    return float(np.nanmean(waited) / np.nanmean(used))


def _positive(value: float) -> float:
    return value if value > 0 else 0.0


FEWEST_BEFORE = 4
"""Steps outside a stretch that say what was usual."""


def usual_wait(table: StepTable, first_step: int, last_step: int) -> float:
    """ns a step that the run's ranks wait for a processor outside these steps, or that the middle one of them
    does in them, whichever is more. Less than this comes and goes on such a machine without a fault."""
    waited = table.columns["run_queue_wait_ns"]
    inside = (table.iteration >= first_step) & (table.iteration <= last_step)
    found = [0.0]
    before = waited[:, ~inside][np.isfinite(waited[:, ~inside])]
    if len(before) >= FEWEST_BEFORE * len(table.ranks):
        found.append(float(np.median(before)))
    meanwhile = [np.nanmean(row) for row in waited[:, inside] if np.isfinite(row).any()]
    if len(meanwhile) > 2:
        found.append(float(lower_median(np.array(meanwhile))))
    return max(found)
