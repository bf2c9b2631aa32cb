"""Decisions of a run as JSON lines, and what reads them.

One record a line: ``start`` (placement, caps, the step with which a process, or a number of micro-batches,
begins), ``decision`` (inputs, predictions, reason, whether it switched) and ``outcome`` (what a switch
brought). A process that resumes appends: records of steps that it repeats follow those of the first time, and
``records`` leaves the older ones out. A script's steps count from the start of each process, so that which
ones it repeats is not known: all its records stay."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .controller import Controller, Outcome
from .decide import Decision
from .situation import Situation

FILE = "pipeline-policy.jsonl"
"""Name of the log in the run's folder."""


def to_standard_error(text: str) -> None:
    """Prints a line for the user of a script."""
    print(f"mt-megatron: {text}", file=sys.stderr, flush=True)


class DecisionLog:
    """Writer of one process's records; with no path it writes nothing. A record that cannot be written is
    lost, which ``say`` is told of once; the run goes on."""

    def __init__(
        self,
        path: Path | None,
        say: Callable[[str], None] = to_standard_error,
        *,
        counts_run: bool = True,
    ) -> None:
        """``counts_run``: steps are those of the run, whichever process makes them."""
        self._path, self._say = path, say
        self._lost = False
        self._repeats = counts_run
        """The next ``start`` is the first of a process that may repeat steps of an earlier one."""

    def start(self, step: int, control: Controller, *, pipelines: int) -> None:
        """A controller begins with ``step``."""
        placement = control.placement
        repeats, self._repeats = self._repeats, False
        self._write(
            {
                "record": "start",
                "step": step,
                "repeats": repeats,
                "ranks": placement.ranks,
                "chunks": placement.chunks,
                "style": placement.style.value,
                "microbatches": control.microbatches,
                "pipelines": pipelines,
                "cap": control.cap,
                "cap_in_bytes": control.cap_is_in_bytes,
                "schedule": control.current.label,
            }
        )

    def decision(
        self,
        step: int,
        decision: Decision,
        situation: Situation,
        *,
        noise: float,
        seconds: float,
        reductions: int,
    ) -> None:
        """A decision for the steps from ``step`` on, which took ``seconds`` to make; ``reductions``: sums
        over all ranks so far."""
        costs = situation.costs
        slow = decision.slow_edge
        self._write(
            {
                "record": "decision",
                "step": step,
                "switched": decision.switches,
                "from": decision.before.label,
                "to": decision.chosen.label,
                "reason": decision.reason,
                "pressure": decision.pressure,
                "predicted_seconds": decision.seconds,
                "predicted_seconds_before": decision.seconds_before,
                "predicted_gain": decision.gain,
                "noise": noise,
                "slow_edge": None if slow is None else [*slow[0], slow[1]],
                "inputs": {
                    "forward": costs.forward,
                    "backward": costs.backward,
                    "input": costs.input,
                    "weight": costs.weight,
                    "delays": [[*edge, situation.delay(edge)] for edge in situation.edges()],
                    "bandwidth_limited": [
                        [*edge, link.bandwidth]
                        for edge, link in sorted(costs.links.items())
                        if link.bandwidth != float("inf")
                    ],
                    "headroom": situation.headroom,
                },
                "considered": dict(decision.predicted),
                "past_the_cap": list(decision.too_large),
                "seconds_to_decide": seconds,
                "reductions": reductions,
            }
        )

    def outcome(self, step: int, outcome: Outcome, *, switch: int) -> None:
        """Gain of the switch whose ``decision`` has the step ``switch``, known at ``step``."""
        self._write(
            {
                "record": "outcome",
                "step": step,
                "decision": switch,
                "steps_before": outcome.steps_before,
                "steps": outcome.steps,
                "seconds_before": outcome.seconds_before,
                "seconds": outcome.seconds,
                "predicted_gain": outcome.predicted_gain,
                "gain": outcome.gain,
            }
        )

    def note(self, step: int, text: str) -> None:
        """Something else that a reader must know."""
        self._write({"record": "note", "step": step, "text": text})

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _append(self._path, (json.dumps(record) + "\n").encode())
        except OSError as error:
            if not self._lost:
                self._say(
                    f"WARNING: decisions of pipeline schedule auto: {self._path}: {error.strerror}; training "
                    "goes on"
                )
            self._lost = True


def _append(path: Path, line: bytes) -> None:
    """One write of a whole line: a process that is killed leaves no half of a record before others, and a
    disk that is full none either. Raises OSError."""
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(number).st_size
        if (written := os.write(number, line)) < len(line):
            os.ftruncate(number, size)
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes of a record were written")
    finally:
        os.close(number)


def find(run: Path) -> Path:
    """The log of ``run``, a file or the folder of a run, the one that is nearest to it. Raises ConfigError
    where there is none, or several that are equally near."""
    if run.is_file():
        return run
    found = sorted(run.rglob(FILE)) if run.is_dir() else []
    if not found:
        raise ConfigError(
            f"found no {FILE} at {run}; expected the folder of a run with --pipeline-schedule auto, or the "
            "file"
        )
    least = min(len(path.parts) for path in found)
    nearest = [path for path in found if len(path.parts) == least]
    if len(nearest) > 1:
        raise ConfigError(
            f"found {len(nearest)} logs at {run}, {nearest[0]} and {nearest[1]} among them; expected the "
            "folder of one run, or the file"
        )
    return nearest[0]


def records(path: Path) -> list[dict[str, Any]]:
    """Records of a log in the order of their steps, those of scripts by process; of steps that a resumed
    process repeated, the later ones. A last line that is cut short is left out. Raises ConfigError for a file
    that is no log."""
    found: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind, step = record["record"], record["step"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                continue
            raise ConfigError(
                f"{path}:{number}: found no record of a decision; expected the log of a run with "
                "--pipeline-schedule auto"
            ) from None
        if kind == "start" and record.get("repeats", True):
            found = [each for each in found if each["step"] < step]
        found.append(record)
    return found
