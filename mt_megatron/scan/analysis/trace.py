"""A run's trace for the analysis: who is where, every rank's records one rank at a time, one clock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScanError
from mt_megatron.scan.clock.fit import Clocks, fit_clocks
from mt_megatron.scan.format.records import KIND, OPEN, PING
from mt_megatron.scan.format.run_files import RunFiles, existing_run, read_run, segment_paths
from mt_megatron.scan.format.segments import (
    PINGS,
    RankTrace,
    damaged_in,
    read_blocks,
    read_rank,
    readable_segments,
)

COORDINATES = ("dp", "pp", "tp", "cp", "ep")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs and what it is responsible for."""

    rank: int
    host: str = ""
    node: int = 0
    dp: int = 0
    pp: int = 0
    tp: int = 0
    cp: int = 0
    ep: int = 0
    layers: int | None = None
    """Of the model, that it holds; None: not said."""

    has_head: bool | None = None
    """Whether it computes the output layer and the loss; None: not said."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One session of a run. Ranks are read when asked for and not kept."""

    files: RunFiles
    facts: Mapping[str, Any]
    """``run.json``."""

    session: int
    ranks: tuple[int, ...]
    """Those whose files can be read, ascending."""

    missing: tuple[int, ...]
    """Those of the run that left nothing."""

    places: Mapping[int, Place]
    clocks: Clocks
    notes: tuple[str, ...] = field(default=())
    unreadable: dict[str, int] = field(default_factory=dict)
    """Sentence on each file that could not be read, or not to its end -> its rank. Grows as ranks are read:
    a file that could be opened may fail later."""

    def rank(self, rank: int) -> RankTrace:
        """Everything ``rank`` wrote, times by its own clock. Raises ``ScanError`` as ``read_rank``."""
        found = read_rank(self.files.rank_folder(rank), session=self.session)
        self.add_unreadable(rank, found.unreadable)
        return found

    def add_unreadable(self, rank: int, sentences: Iterable[str]) -> None:
        """Add ``sentences`` on files of ``rank`` to ``unreadable``."""
        self.unreadable.update(dict.fromkeys(sentences, rank))

    def clock_error(self, ranks: Iterable[int]) -> float:
        """ns by which times of these ranks may be wrong against each other; 0 on one clock."""
        return clock_error(self.clocks, ranks)

    @property
    def simulated(self) -> bool:
        """Whether a simulator made it."""
        return bool(self.facts.get("simulated", False))


def open_trace(run: Path | str, *, start: int | None = None, causality: bool = False) -> Trace:
    """One start of ``run`` (a run's folder or its ``scan`` folder), clocks fitted; with ``causality`` so that
    nothing is received before it was sent, which reads every rank once.

    ``start``: its number, from 1; None for the newest that recorded a whole step, as a start that found the
    run finished and only evaluated it has none. Raises ``ScanError`` when there is no such start, no trace,
    or none of its ranks can be read.
    """
    files = existing_run(run)
    notes: list[str] = []
    try:
        facts = read_run(files)
    except ScanError as error:
        # Rank 0's disk may be the one that failed: what the ranks say of themselves is enough.
        facts = {}
        notes.append(f"{error}; places are taken from the ranks' own files")
    segments: dict[int, list[_Segment]] = {}
    damaged: dict[int, dict[Path, str]] = {}
    for rank in files.ranks():
        segments[rank], damaged[rank] = readable_segments(segment_paths(files.rank_folder(rank)))
    numbers = {_session(meta) for each in segments.values() for _, meta in each}
    if not numbers:
        expected = "expected files such as rank-00000/000000.scan"
        nothing = f"found no readable segment below {files.root}; {expected}"
        raise ScanError(next((text for each in damaged.values() for text in each.values()), nothing))
    if start is not None and start - 1 not in numbers:
        known = ", ".join(str(number + 1) for number in sorted(numbers))
        raise ScanError(f"found no start {start} in {files.root}; expected one of {known}. Change --start")
    chosen = start - 1 if start is not None else _newest_with_steps(files, segments, sorted(numbers))
    unreadable = {
        text: rank for rank, each in segments.items() for text in damaged_in(chosen, each, damaged[rank])
    }
    if len(numbers) > 1:
        later = "" if chosen == max(numbers) else "; later starts recorded no whole step"
        notes.append(
            f"the run was started {max(numbers) + 1} times; this is what start {chosen + 1} recorded"
            f"{'' if start else later}, --start N shows another"
        )
    # The whole of one rank at a time.
    shared: dict[str, Any] = {}
    light = {
        rank: _Light(files.rank_folder(rank), chosen, kept, shared)
        for rank, each in segments.items()
        if (kept := [segment for segment in each if _session(segment[1]) == chosen])
    }
    world = int(facts.get("world_size", max(light) + 1))
    missing = tuple(rank for rank in range(world) if rank not in light)
    if missing:
        notes.append(
            f"{len(missing)} of {world} ranks left no readable file ({_few(missing)}): groups with them are "
            "not judged by their transfers"
        )
    clocks = fit_clocks(light, causality=causality)
    return Trace(
        files=files,
        facts=facts,
        session=chosen,
        ranks=tuple(sorted(light)),
        missing=missing,
        places=places_of(facts, {rank: each.meta for rank, each in light.items()}),
        clocks=clocks,
        notes=(*notes, *clocks.notes),
        unreadable=unreadable,
    )


def clock_error(clocks: Clocks, ranks: Iterable[int]) -> float:
    """ns by which times of ``ranks`` may be wrong against each other; 0 on one clock, inf if unknown."""
    members = list(ranks)
    if len({clocks.domains.get(rank, rank) for rank in members}) < 2:
        return 0.0
    worst = 0.0
    for rank in members:
        known = clocks.residuals.get(rank)
        if known is None:
            return float("inf")
        if known.source == "reference" or (known.source == "same clock" and not known.hops):
            continue
        if known.source not in ("pings", "same clock"):
            return float("inf")
        parts = [part for part in (known.residual_p99, known.triangle) if part == part]
        if not parts:
            parts = [known.uncertainty]
        worst = max(worst, *parts)
    return 2.0 * worst if worst == worst else float("inf")


def places_of(facts: Mapping[str, Any], metas: Mapping[int, Mapping[str, Any]]) -> dict[int, Place]:
    """Who is where: ``run.json``'s word, and where it is silent the ranks' own (their first notes)."""
    found = {rank: _place(rank, meta) for rank, meta in metas.items()}
    for row in facts.get("ranks", ()):
        rank = int(row["rank"])
        found[rank] = _place(rank, {**metas.get(rank, {}), **row})
    return found


def _place(rank: int, said: Mapping[str, Any]) -> Place:
    inner = said.get("coordinates")
    facts = {**inner, **said} if isinstance(inner, Mapping) else said
    numbers = {axis: int(facts.get(axis) or 0) for axis in COORDINATES}
    layers, has_head = facts.get("layers"), facts.get("has_head")
    return Place(
        rank=rank,
        host=str(facts.get("host") or ""),
        node=int(facts.get("node") or 0),
        layers=None if layers is None else int(layers),
        has_head=None if has_head is None else bool(has_head),
        **numbers,
    )


def _few(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:6])
    return shown + (" ..." if len(ranks) > 6 else "")


_Segment = tuple[Path, dict[str, Any]]
"""A segment's file and its first note."""


def _session(meta: Mapping[str, Any]) -> int:
    return int(meta.get("session", 0))


def _newest_with_steps(
    files: RunFiles, segments: Mapping[int, Sequence[_Segment]], sessions: Sequence[int]
) -> int:
    """The last of ``sessions`` in which a rank ended a step; the last one where none did."""
    for session in reversed(sessions if len(sessions) > 1 else ()):
        for rank, each in segments.items():
            if all(_session(meta) != session for _, meta in each):
                continue
            spans = read_rank(files.rank_folder(rank), session=session).spans
            if np.any((spans["kind"] == KIND["step"]) & (spans["end"] != OPEN)):
                return session
    return sessions[-1]


class _Light:
    """What the clock fit needs of a rank; its spans are read only if the fit asks for them."""

    def __init__(
        self, folder: Path, session: int, segments: Sequence[_Segment], shared: dict[str, Any]
    ) -> None:
        self._folder = folder
        self._session = session
        self._shared = shared
        self._paths = [path for path, _ in segments]
        self.meta: dict[str, Any] = segments[0][1]

    @cached_property
    def pings(self) -> NDArray[np.void]:
        """``PING`` records of all segments."""
        found: list[NDArray[np.void]] = []
        for path in self._paths:
            # A file that is damaged there, or gone by now, gives what came before; ``read_rank`` names it.
            with contextlib.suppress(OSError, ScanError):
                found.extend(payload for kind, payload, _ in read_blocks(path) if kind == PINGS)
        return np.concatenate(found) if found else np.empty(0, dtype=PING)

    @property
    def spans(self) -> NDArray[np.void]:
        """Read when asked for, and kept until another rank's are."""
        return self._whole().spans

    @property
    def groups(self) -> Mapping[int, Any]:
        """Groups by number."""
        return self._whole().groups

    @property
    def strings(self) -> list[str]:
        """Names by number."""
        return self._whole().strings

    def _whole(self) -> RankTrace:
        if self._shared.get("folder") != self._folder:
            self._shared.update(folder=self._folder, trace=read_rank(self._folder, session=self._session))
        found: RankTrace = self._shared["trace"]
        return found
