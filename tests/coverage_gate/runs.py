"""Runs the named tests in a few shared launches and collects what they executed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.coverage_gate.case import Case
from tests.coverage_gate.gate import read_records
from tests.launch import RankError, run_ranks

TIMEOUT = 240.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """The outcome of one or more shared launches."""

    errors: Mapping[str, str]
    """Case name -> tracebacks of the ranks on which it failed."""
    seconds: Mapping[str, float]
    """Case name -> its longest time over ranks."""
    records: Mapping[str, set[str]]
    """Case name -> keys of the points it executed. A failed case is not in it."""
    patches: frozenset[str]
    """Ids of the patches that ``patch()`` applied."""


def run_cases(
    cases: Sequence[Case],
    target: str = "cpu",
    timeout: float = TIMEOUT,
    environment: Mapping[str, str] | None = None,
    traced: bool = True,
) -> Run:
    """Run ``cases``, one launch per world size and selection of features that they need.

    ``target`` names the backend and ``environment`` is added to the processes': the emulator's, say. Without
    ``traced`` only values are checked, and records stay empty.
    """
    env = {**(environment or {}), "MT_MEGATRON_TEST_BACKEND": target}
    errors: dict[str, str] = {}
    seconds: dict[str, float] = {}
    patches: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mt_megatron_gate_") as folder:
        for launch in sorted({found.layout.launch for found in cases}):
            world, without = launch
            names = [found.name for found in cases if found.layout.launch == launch]
            try:
                ranks = run_ranks(
                    world,
                    "tests.coverage_gate.worker:run",
                    names,
                    without,
                    folder,
                    traced,
                    timeout=timeout,
                    env=env,
                )
            except RankError as error:
                errors[names[0]] = str(error)
                errors.update(dict.fromkeys(names[1:], f"its launch died: see {names[0]}"))
                continue
            if not without:
                patches.update(*(rank["patches"] for rank in ranks))
            for name in names:
                outcomes = [rank["cases"][name] for rank in ranks]
                seconds[name] = max(outcome["seconds"] for outcome in outcomes)
                failed = [
                    f"--- rank {number} of {world}\n{outcome['error']}"
                    for number, outcome in enumerate(outcomes)
                    if outcome["error"]
                ]
                if failed:
                    errors[name] = "\n".join(failed)
        records = read_records(Path(folder))
    for name in errors:
        # What a failing test passed through proves nothing.
        records.pop(name, None)
    return Run(errors=errors, seconds=seconds, records=records, patches=frozenset(patches))
