"""A finding in words: who, what it does, what it costs, and what to do when the diagnosis said nothing."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mt_megatron.scan.analysis.trace import Place

from .finding import SURE, Cause, Finding, steps_text

CAUSE_LABEL: dict[Cause, str] = {
    "slow_compute": "slow compute",
    "host_contention": "host contention",
    "host_pause": "host pause",
    "slow_data": "slow data",
    "slow_checkpoint": "slow checkpoint",
    "uneven_work": "uneven work",
    "slow_link": "slow link",
    "slow_group": "slow group",
    "slow_node_link": "slow node link",
    "hang": "hang",
    "unknown": "unknown",
}
"""The short name of a cause, as legends and tables show it."""

_ONE_RANK: dict[Cause, str] = {
    "slow_compute": "computes slowly",
    "host_contention": "waits for a processor: its host is busy with something else",
    "host_pause": "stood still for a while",
    "slow_data": "waits for its training data",
    "slow_checkpoint": "takes long to write its checkpoint",
    "uneven_work": "has more work than the others",
}

_ALL_RANKS: dict[Cause, str] = {
    "slow_compute": "computes slowly",
    "host_contention": "waits for processors",
    "host_pause": "stood still for a while",
    "slow_data": "waits for its training data",
    "slow_checkpoint": "takes long to write its checkpoints",
    "uneven_work": "has more work",
}

_NEXT_STEP: dict[Cause, str] = {
    "slow_compute": "Run `mt-megatron scan selftest` on that host: it compares its processor, memory and "
    "disk with the others'. If it stands out there too, restart without the host.",
    "host_contention": "Look on that host for other processes, a CPU quota of the container, or missing "
    "pinning; move or stop what competes.",
    "host_pause": "Look for stops of the process (a debugger, the container's freezer, swapping), and for "
    "garbage collection if its pauses are named.",
    "slow_data": "Look at the storage and the loader's workers of that rank: more workers, a local copy "
    "of the data, or another disk.",
    "slow_checkpoint": "Look at the disk or file system that rank writes to; an asynchronous save takes "
    "the writing out of the step.",
    "uneven_work": "Nothing is broken there: balance the work (packed lengths, experts, layers per stage).",
    "slow_link": "Run `mt-megatron scan selftest` to measure that pair directly, then look at its cable, "
    "port and network counters.",
    "slow_group": "No pair stands out: look at what the whole group shares (switch, protocol settings).",
    "slow_node_link": "Look at that node's network card, cable and switch port; restart without the node if "
    "they cannot be put right now.",
    "hang": "Look on its host whether the process still runs, is stopped, or is out of memory; "
    "`py-spy dump --pid PID` shows where it stands.",
    "unknown": "Record more: `mt-megatron scan level RUN full` for a few hundred steps, then report again.",
}

_NEXT_STEP_ENDED: dict[Cause, str] = {
    "hang": "Look in that host's system log whether the process was killed, stopped, or out of memory.",
    "unknown": "If it comes back in the next run, start that one with `--scan full` and report again.",
}
"""Where the run has ended and a running job's commands are of no use."""

_ONE_HOST: dict[Cause, str] = {
    "slow_compute": "All ranks of this run are on that host. Look for other processes and a processor or "
    "device that has clocked down; `mt-megatron scan selftest` under torchrun compares its ranks.",
}
"""Where there is no other host to go on with."""

_NEXT_STEP_ALL: dict[Cause, str] = {
    "slow_compute": "Look what changed for all ranks at that step: the work itself, or the clock of all "
    "processors or devices.",
    "host_contention": "Raise the quota of processor time (`cpu.max` of the container), or start fewer "
    "threads (`OMP_NUM_THREADS`, loader workers).",
    "slow_data": "Look at the storage that all loaders share: more workers, or a local copy of the data. "
    "Where queues held several batches, these were ready: look what else takes the host's processors.",
}


_MOST_NOTES = 20
_READ_STACKS = "Read where the rank stands in its stack; what it waits for there holds up everybody."


def rank_list(ranks: Iterable[int]) -> str:
    """``0-3, 8``: global ranks in order, runs of three or more shortened."""
    ordered = sorted(set(ranks))
    parts: list[str] = []
    at = 0
    while at < len(ordered):
        last = at
        while last + 1 < len(ordered) and ordered[last + 1] == ordered[last] + 1:
            last += 1
        if last - at >= 2:
            parts.append(f"{ordered[at]}-{ordered[last]}")
        else:
            parts.extend(str(rank) for rank in ordered[at : last + 1])
        at = last + 1
    return ", ".join(parts)


def number_of_ranks(count: int) -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{count} rank{'s' * (count != 1)}"


def headline(finding: Finding) -> str:
    """The culprit first, in one line without a full stop: ``Rank 5 (node-1) computes slowly``."""
    ranks = rank_list(finding.ranks)
    host = f" ({finding.host})" if finding.host else ""
    many = "Ranks" if len(finding.ranks) > 1 else "Rank"
    if finding.cause == "hang":
        return _hang(finding, f"{many} {ranks}{host}" if finding.ranks else "The run")
    if finding.whole_run:
        steps = when(finding)
        words = _ALL_RANKS.get(finding.cause, "was slower")
        return (
            f"The whole run{f' on {finding.host}' if finding.host else ''} {words} in {steps}; no single rank"
        )
    if finding.cause == "slow_link":
        return f"The link between ranks {ranks.replace(', ', ' and ')}{host} is slow"
    if finding.cause == "slow_group":
        group = f"the {finding.group} group" if finding.group else "a group"
        return f"Communication in {group} of ranks {ranks} is slow, no pair more than another"
    if finding.cause == "slow_node_link":
        return f"The network link of {finding.host or 'one node'} (ranks {ranks}) is slow"
    if finding.cause == "unknown" or not finding.ranks:
        if not finding.ranks:
            return "Something delays the run, cause unknown"
        return f"{many} {ranks}{host} {'delay' if many == 'Ranks' else 'delays'} the run, cause unknown"
    words = _ONE_RANK[finding.cause]
    if len(finding.ranks) > 1:
        words = words.replace("computes", "compute").replace("waits", "wait").replace("has ", "have ")
        words = words.replace("takes", "take").replace("its ", "their ")
    return f"{many} {ranks}{host} {words}"


def _hang(finding: Finding, who: str) -> str:
    operation = finding.details.get("collective") or finding.details.get("op")
    number = finding.details.get("seq")
    if inside := finding.details.get("inside"):
        return f"{who} {'stand' if len(finding.ranks) > 1 else 'stands'} still in {inside}"
    if operation is None:
        return f"{who} {'keep' if len(finding.ranks) > 1 else 'keeps'} the others waiting"
    which = f" number {number}" if number is not None else ""
    group = f" of the {finding.group} group" if finding.group else ""
    edge: list[int] = list(finding.details.get("ranks") or ())
    if str(operation).startswith(("send", "recv")) and len(edge) == 2:
        group = f" from rank {edge[0]} to rank {edge[1]}"
    one = len(finding.ranks) <= 1
    blind = finding.details.get("no_records")
    if blind and not finding.ranks:
        return f"{who} stands still: {operation}{which}{group} does not end; no records of {_few(blind)}"
    if finding.confidence < 0.9:
        # All have entered it: none of them is to blame more than the others.
        return f"{who} {'stands' if one else 'stand'} still: {operation}{which}{group} does not end"
    return f"{who} {'keeps' if one else 'keep'} the others waiting: {operation}{which}{group} does not end"


def _few(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {rank_list(ranks)}"


def cost(finding: Finding, seconds: float | None = None) -> str:
    """``12.3 % of the time of steps 40-80``; a hang costs all of it. ``seconds``: what those steps took."""
    steps = steps_text(finding.first_step, finding.last_step)
    if finding.cause == "hang":
        return f"everything since step {finding.last_step}"
    lost = f"{100 * finding.lost_fraction:.1f} % of the time of {steps}"
    if not seconds:
        return lost
    return f"{lost}, {_duration(finding.lost_fraction * seconds)} out of {_duration(seconds)}"


def sentence(text: str) -> str:
    """With a capital letter, unless it begins with a group's name, and a full stop."""
    text = text.strip()
    name = re.match(r"(tp|dp|pp|cp|ep|edp)\b", text)
    return text[: 1 - bool(name)].upper() + text[1 - bool(name) :] + ("" if text[-1:] in ".!?:" else ".")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def place_text(place: Place) -> str:
    """``dp 2 pp 0 tp 1``, and ``cp``, ``ep`` where they are not 0."""
    more = "".join(f" {axis} {getattr(place, axis)}" for axis in ("cp", "ep") if getattr(place, axis))
    return f"dp {place.dp} pp {place.pp} tp {place.tp}{more}"


def clock_words(reference: int, one_clock: bool, residual_p99_ns: Mapping[int, float]) -> str:
    """How far times of different ranks can be compared; empty where nothing was measured."""
    if one_clock:
        return "All ranks read the clock of one machine; nothing had to be put right."
    known = {rank: value for rank, value in residual_p99_ns.items() if math.isfinite(value)}
    if not known:
        return ""
    worst = max(known, key=lambda rank: known[rank])
    return (
        f"Reference: rank {reference}. 99th percentile of what remains between clocks: "
        f"{time_text(statistics.median(known.values()))} in the middle of the ranks, "
        f"{time_text(known[worst])} at worst (rank {worst}). A time difference below that says nothing."
    )


def time_text(ns: float) -> str:
    """``1.24 s``, ``35.1 ms`` or ``12 us``."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if abs(ns) >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def when(finding: Finding) -> str:
    """``steps 40-80``, and in how many stretches of them if it came back."""
    stretches = len(finding.details.get("stretches") or ())
    steps = steps_text(finding.first_step, finding.last_step)
    return f"{stretches} stretches of {steps}" if stretches > 1 else steps


def weak_signal(finding: Finding) -> str:
    """A finding below ``SURE`` in one line: what was seen, and no verdict."""
    steps = when(finding)
    tail = f"{100 * finding.lost_fraction:.1f} % of their time; confidence {finding.confidence:.2f}"
    if finding.whole_run:
        return f"The whole run was slower in {steps}; no single rank ({tail})"
    if not finding.ranks:
        return f"Something may have delayed the run in {steps} ({tail})"
    host = f" ({finding.host})" if finding.host else ""
    who = f"{'Ranks' if len(finding.ranks) > 1 else 'Rank'} {rank_list(finding.ranks)}{host}"
    if finding.lateness == "slow_transfer":
        who = f"Communication among {who[0].lower()}{who[1:]}"
    return f"{who} may have been slow in {steps} ({tail})"


MOST_WEAK = 10
"""Weak signals that are shown; all of them are in report.json."""

WEAK_SIGNALS = f"Below a confidence of {SURE:g} a finding claims nothing; on a busy machine many are chance."


def named_before(finding: Finding) -> str:
    """That the watcher named what the judgement of all steps does not claim."""
    return (
        f"while the run trained the watcher named: {headline(finding)}, "
        f"{cost(finding)} (confidence {finding.confidence:.2f}); over all steps that is no claim"
    )


def only_host(hosts: Iterable[str]) -> bool:
    """Whether all ranks, of ``hosts``, are known to be on the same one."""
    names = set(hosts)
    return len(names) == 1 and "" not in names


def next_step(finding: Finding, *, run_ended: bool = False, one_host: bool = False) -> str:
    """The diagnosis's own advice, else what is always worth doing for such a cause.

    ``run_ended``: no command for a running job helps. ``one_host``: all ranks are on the same host.
    """
    if finding.cause == "hang" and any((finding.details.get("stacks") or {}).values()):
        return finding.advice or _READ_STACKS
    if finding.advice:
        return finding.advice
    steps = dict(_NEXT_STEP)
    if one_host:
        steps |= _ONE_HOST
    if run_ended:
        steps |= _NEXT_STEP_ENDED
    if finding.whole_run:
        steps |= _NEXT_STEP_ALL
    return steps[finding.cause]


def limits(notes: Sequence[str]) -> list[str]:
    """The first of many ``notes``, and how many more there are."""
    more = len(notes) - _MOST_NOTES
    return [*notes[:_MOST_NOTES], *([f"{more} more like these: see report.json"] if more > 0 else [])]


def culprits_first(findings: Iterable[Finding]) -> list[Finding]:
    """Hangs, then what costs most; what is unknown last."""
    return sorted(
        findings,
        key=lambda each: (each.cause != "hang", each.cause == "unknown", -each.lost_fraction, each.ranks),
    )


def claims_and_signals(found: Sequence[Finding]) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """The claims, culprits first, and apart from them the weak signals, surest first."""
    weak = [each for each in found if not each.is_claim]
    weak.sort(key=lambda each: (-each.confidence, each.first_step))
    return tuple(culprits_first(each for each in found if each.is_claim)), tuple(weak)
