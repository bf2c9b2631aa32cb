"""What the exports share: the file that appears whole or not at all, facts of ranks, findings on record."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, get_args

from mt_megatron.errors import ScanError
from mt_megatron.scan.analysis.trace import Trace
from mt_megatron.scan.findings.finding import Cause, Finding
from mt_megatron.scan.findings.text import place_text
from mt_megatron.scan.format.permissions import grant
from mt_megatron.scan.format.run_files import RunFiles, read_run


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    events: int
    ranks: int
    bytes: int


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, with the modes of its trace (``permissions``), that takes ``path``'s place when all
    went well and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        grant(Path(name))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def rank_title(trace: Trace, rank: int) -> str:
    """``rank 5 (dp 1 pp 0 tp 1) node-3``, and whether it is simulated."""
    place = trace.places.get(rank)
    simulated = " simulated" if trace.simulated else ""
    if place is None:
        return f"rank {rank}{simulated}"
    host = f" {place.host}" if place.host else ""
    return f"rank {rank} ({place_text(place)}){host}{simulated}"


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
