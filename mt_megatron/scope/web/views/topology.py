"""Ranks and their places, with scan's verdicts."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from mt_megatron.errors import ScanError
from mt_megatron.scan.findings.recorded import findings_on_record
from mt_megatron.scan.format.run_files import RunFiles, read_run, run_files, segment_paths

from .context import Answer, Context

_AXES = ("tp", "cp", "ep", "pp", "dp")


def topology(context: Context, query: dict[str, Any]) -> Answer:
    """Every rank with host and coordinates (the recording's, else ``scan/run.json``'s), how long its trace
    has been silent, and the findings of scan's watcher."""
    facts = context.source.facts()
    places = {int(row["rank"]): dict(row) for row in facts.get("ranks") or ()}
    findings: list[dict[str, Any]] = []
    if context.folder is not None:
        files = run_files(context.folder)
        for row in _scan_ranks(files):
            known = places.setdefault(int(row["rank"]), {})
            for key in ("rank", "host", "node", *_AXES):
                if key in row and known.get(key) is None:
                    known[key] = row[key]
        for finding in findings_on_record(files):
            findings.append(
                {**finding.to_dict(), "is_claim": finding.is_claim, "whole_run": finding.whole_run}
            )
        for rank in files.ranks():
            places.setdefault(rank, {"rank": rank})["silent_seconds"] = _silent(files, rank)
    world = int(facts.get("world_size") or len(places))
    for rank in range(world):
        places.setdefault(rank, {"rank": rank})
    return Answer(
        facts={
            "world_size": world,
            "ranks": [places[rank] for rank in sorted(places)],
            "findings": findings,
            "trace": context.folder is not None and (context.folder / "scan").is_dir(),
        }
    )


def _scan_ranks(files: RunFiles) -> list[dict[str, Any]]:
    with contextlib.suppress(ScanError, OSError):
        rows = read_run(files).get("ranks", [])
        return [
            {**(row.get("coordinates") or {}), **row}
            for row in rows
            if isinstance(row, dict) and "rank" in row
        ]
    return []


def _silent(files: RunFiles, rank: int) -> float | None:
    """Seconds since the rank's trace grew."""
    with contextlib.suppress(OSError, IndexError):
        return max(0.0, time.time() - segment_paths(files.rank_folder(rank))[-1].stat().st_mtime)
    return None
