"""Findings that the watcher wrote beside the trace, and which of them a diagnosis does not claim."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args

from mt_megatron.errors import ScanError
from mt_megatron.scan.format.run_files import RunFiles, read_run

from .finding import Cause, Finding


def unclaimed(recorded: Iterable[Finding], claims: Iterable[Finding]) -> list[Finding]:
    """Of what the watcher named, those for which ``claims`` have nothing at the same ranks and steps."""
    claimed = list(claims)
    return [
        each for each in recorded if each.is_claim and not any(_same_matter(each, one) for one in claimed)
    ]


def _same_matter(one: Finding, other: Finding) -> bool:
    together = one.first_step <= other.last_step and other.first_step <= one.last_step
    return together and (bool(set(one.ranks) & set(other.ranks)) or not one.ranks or not other.ranks)


def findings_on_record(files: RunFiles) -> list[Finding]:
    """What the watcher wrote since the run was started last, the newest word on each culprit; torn lines are
    left out."""
    started = 0.0
    with contextlib.suppress(ScanError):
        started = float(read_run(files).get("started_unix_ns", 0)) / 1e9
    latest: dict[tuple[Any, ...], Finding] = {}
    known = {each.name for each in fields(Finding)}
    with contextlib.suppress(FileNotFoundError), open(files.findings, encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
                row = {**row, **row.get("finding", {})}
                if float(row.get("time_unix", started)) < started:
                    continue
                row["ranks"] = tuple(row.get("ranks", ()))
                row["evidence"] = tuple(row.get("evidence", ()))
                if row["cause"] not in get_args(Cause):
                    continue  # of another version, and nobody here has words for it
                for name in ("lost_fraction", "confidence"):
                    row[name] = float(row[name])
                finding = Finding(**{name: value for name, value in row.items() if name in known})
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
            latest[finding.cause, finding.ranks, finding.group] = finding
    return list(latest.values())
