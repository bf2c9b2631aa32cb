"""Simulated steps as the files of a trace: each rank's spans by its own clock, as they ended."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScanError
from mt_megatron.scan.format.permissions import make_private_folder
from mt_megatron.scan.format.records import KIND, OPEN, SPAN
from mt_megatron.scan.format.run_files import RunFiles, segment_path, write_run
from mt_megatron.scan.format.segments import Group, SegmentWriter

from .clocks import ClockSet, Pings, Wander, uptime
from .columns import STRINGS
from .counters import NAMES, HostCounters
from .engine import Engine, Step
from .faults import Fault
from .job import Job
from .layout import Layout
from .noise import Floats
from .schedule import DIRECTIONS

_SEGMENT_BYTES = 32 << 20
_MOST_BUFFERED = 256 << 20
_CHECKPOINT_BYTES = 1 << 30


class RankFiles:
    """Writes a run's folder step by step; at most a few hundred MiB wait in memory."""

    def __init__(self, files: RunFiles, engine: Engine, wander: Wander) -> None:
        """Make the folder, ``run.json`` and one file per rank. Raises ``ScanError`` when there is a trace."""
        if files.ranks() or files.run_json.exists():
            raise ScanError(f"{files.root} holds a trace already; choose another folder or remove it")
        self.files, self._engine, self._job = files, engine, engine.job
        layout = self._job.layout
        self.clocks = ClockSet(layout, engine.noise, wander)
        self._pings = Pings(layout, engine.noise, self.clocks)
        self._counters = HostCounters(self._job, engine.noise, len(STRINGS))
        self._hosts = np.arange(layout.world_size) // layout.ranks_per_node
        self._waiting: dict[int, list[bytes]] = defaultdict(list)
        self._waiting_counters: dict[int, list[bytes]] = defaultdict(list)
        self._size = 0
        self._checkpoints = 0
        self._numbers = [0] * layout.world_size
        self._written = [0] * layout.world_size
        self._groups = group_tables(layout, engine.template.columns.groups)
        write_run(files, run_facts(self._job))
        for rank in range(layout.world_size):
            make_private_folder(files.rank_folder(rank))
            self._begin_file(rank)

    @property
    def events(self) -> int:
        """Spans of a step without pauses and checkpoint, of all ranks."""
        valid = self._engine.template.valid.sum()
        return int(valid) * self._job.layout.world_size // self._job.layout.pp

    def add(self, step: Step, depth: Floats, faults: list[Fault]) -> None:
        """Everything that happened in ``step``; ``depth`` [ranks] of the data queues."""
        self._spans(step)
        counters, noticed = self._counters.after(step, depth, faults)
        for rank, (times, records) in counters.items():
            records["time"] = self.clocks.shown(self.host(rank), times)
            self._waiting_counters[rank].append(records.tobytes())
        pauses = [pause for pause in step.pauses if pause[1] == "gc"]
        pauses += [(rank, "stopped", begin, end) for rank, begin, end in noticed]
        for rank, name, begin, end in pauses:
            if np.isfinite(begin) and np.isfinite(end):
                self._one(rank, "pause", name, begin, end, step.number)
        if step.checkpoint is not None:
            self._checkpoint(step, *step.checkpoint)
        for rank, pings in self._pings.until(_latest(step)).items():
            self._append(rank, pings=pings)
        if self._size > _MOST_BUFFERED:
            self.flush()

    def close(self, last: Step) -> None:
        """The last pings, and what still waits."""
        for rank, pings in self._pings.until(_latest(last), last=True).items():
            self._append(rank, pings=pings)
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        for rank in sorted({*self._waiting, *self._waiting_counters}):
            self._append(
                rank,
                spans=b"".join(self._waiting.pop(rank, [])),
                counters=b"".join(self._waiting_counters.pop(rank, [])),
            )
        self._size = 0

    def host(self, rank: int) -> int:
        """Machine of ``rank``."""
        return int(self._hosts[rank])

    # -- spans

    def _spans(self, step: Step) -> None:
        """All spans of a step; shapes [ranks of the stage, columns]."""
        template, layout = self._engine.template, self._job.layout
        finite = step.begin[np.isfinite(step.begin)]
        slope, ahead = self.clocks.line(self._hosts, float(finite.min()), _latest(step))
        for stage in range(layout.pp):
            columns = int(template.valid[stage].sum())
            ranks = layout.ranks()[stage].ravel()
            begin = step.begin[:columns, stage].reshape(columns, -1).T
            end = step.end[:columns, stage].reshape(columns, -1).T
            made = np.empty((len(ranks), columns), SPAN)
            made[:] = template.spans[stage, :columns]
            made["iteration"] = step.number
            made["begin"] = self._shown(begin, slope[ranks], ahead[ranks])
            made["end"] = self._shown(end, slope[ranks], ahead[ranks])
            seq = template.spans["seq"][stage, :columns]
            grown = seq + (step.number - 1) * template.per_step[stage, :columns]
            world = template.spans["group"][stage, :columns] == template.world_seq
            grown = grown + np.where(world & (seq >= 0), self._checkpoints, 0)
            made["seq"] = np.where(seq >= 0, grown, -1)
            p2p = template.spans["kind"][stage, :columns] == KIND["p2p"]
            made["peer"] = np.where(p2p, template.spans["peer"][stage, :columns] + ranks[:, None], -1)
            self._work(step, stage, columns, made)
            happens = np.isfinite(begin)
            for row, rank in enumerate(ranks.tolist()):
                own = made[row] if happens[row].all() else made[row][happens[row]]
                self._add_bytes(rank, own.tobytes())

    def _shown(self, times: Floats, slope: Floats, ahead: Floats) -> NDArray[np.int64]:
        with np.errstate(invalid="ignore"):
            shown = np.rint(times * (1 + slope[:, None]) + ahead[:, None])
        return np.where(
            np.isfinite(times), np.nan_to_num(shown, posinf=0.0).astype(np.int64) + uptime(), OPEN
        )

    def _work(self, step: Step, stage: int, columns: int, made: NDArray[np.void]) -> None:
        """Tokens of batches, rows of experts and their bytes."""
        template, layout, draws = self._engine.template, self._job.layout, step.draws
        replicas = np.arange(len(made)) // (layout.cp * layout.tp)
        batches = template.data[stage, :columns]
        with_data = np.flatnonzero(batches >= 0)
        tokens = draws.tokens[batches[with_data]][:, replicas].T / layout.cp
        made["work"][:, with_data] = np.rint(tokens).astype(np.int64)
        if draws.rows is None:
            return
        rows = template.rows[stage, :columns]
        for column in np.flatnonzero(rows[:, 0] >= 0).tolist():
            which, ordinal, piece = rows[column].tolist()
            direction = DIRECTIONS[which]
            layer = self._engine.pieces[direction][piece].layer
            at = np.array([ordinal]), np.array([stage])
            own = self._engine.rows_of(draws, direction, at[0], layer, at[1])[0].ravel()
            if template.spans["kind"][stage, column] == KIND["module"]:
                made["work"][:, column] = np.rint(own * self._job.tokens / layout.cp)
            else:
                made["bytes"][:, column] = np.rint(own * made["bytes"][:, column])

    def _checkpoint(self, step: Step, begin: Floats, end: Floats, over: Floats) -> None:
        world = self._job.layout.world_size
        template = self._engine.template
        at = np.stack([begin.ravel(), end.ravel(), over.ravel()])
        seq = -1
        if world > 1:
            counted = template.columns.tail["agreement"][0]
            per_step = int(template.per_step[0, counted])
            seq = step.number * per_step + self._checkpoints
            self._checkpoints += 1
        for rank in range(world):
            self._one(rank, "checkpoint", "checkpoint", at[0, rank], at[2, rank], step.number)
            self._one(
                rank, "checkpoint", "write", at[0, rank], at[1, rank], step.number, size=_CHECKPOINT_BYTES
            )
            if seq >= 0:
                self._one(rank, "collective", "all_reduce", at[1, rank], at[2, rank], step.number, seq=seq)

    def _one(
        self,
        rank: int,
        kind: str,
        name: str,
        begin: float,
        end: float,
        iteration: int,
        *,
        size: int = -1,
        seq: int = -1,
    ) -> None:
        if not np.isfinite(begin):
            return
        record = np.zeros(1, SPAN)
        clock = self.clocks.shown(self.host(rank), np.array([begin, end if np.isfinite(end) else begin]))
        record["begin"] = clock[0]
        record["end"] = clock[1] if np.isfinite(end) else OPEN
        record["bytes"], record["seq"], record["peer"] = size, seq, -1
        record["iteration"], record["kind"], record["name"] = iteration, KIND[kind], STRINGS.index(name)
        record["microbatch"] = record["chunk"] = -1
        record["group"] = self._engine.template.world_seq if kind == "collective" else 0
        self._add_bytes(rank, record.tobytes())

    def _add_bytes(self, rank: int, spans: bytes) -> None:
        self._waiting[rank].append(spans)
        self._size += len(spans)

    # -- files

    def _append(
        self,
        rank: int,
        *,
        spans: bytes = b"",
        counters: bytes = b"",
        pings: NDArray[np.void] | None = None,
    ) -> None:
        """A file is opened for as long as it takes: a thousand ranks have more files than a process may."""
        most = _SEGMENT_BYTES // SPAN.itemsize * SPAN.itemsize
        for start in range(0, max(len(spans), 1), most):
            if self._written[rank] >= _SEGMENT_BYTES:
                self._numbers[rank] += 1
                self._begin_file(rank)
            part = spans[start : start + most]
            with _Appending(self._path(rank)) as writer:
                writer.spans(part)
                if start == 0:
                    writer.counters(counters)
                    if pings is not None:
                        writer.pings(pings)
            self._written[rank] += len(part) + len(counters)

    def _path(self, rank: int) -> Path:
        return segment_path(self.files.rank_folder(rank), self._numbers[rank])

    def _begin_file(self, rank: int) -> None:
        shown = int(self.clocks.shown(self.host(rank), np.float64(0)))
        meta = {**rank_facts(self._job.layout, rank, shown), "segment": self._numbers[rank]}
        writer = SegmentWriter(self._path(rank), rank, meta)
        writer.strings([*STRINGS, *NAMES])
        writer.groups(self._groups[rank])
        writer.close()
        self._written[rank] = 0


class _Appending(SegmentWriter):
    """Goes on with a file that a ``SegmentWriter`` began and closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._strings = 0
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.size = os.fstat(self._file).st_size

    def __enter__(self) -> _Appending:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _latest(step: Step) -> float:
    finite = step.end[np.isfinite(step.end)]
    return float(finite.max()) if finite.size else float(np.nanmin(step.begin))


STARTED_UNIX_NS = 1_767_225_600_000_000_000
"""When simulated runs say that they began: the same always, so that equal seeds make equal files."""


def run_facts(job: Job) -> dict[str, Any]:
    """For ``run.json``."""
    layout = job.layout
    return {
        "simulated": True,
        "world_size": layout.world_size,
        "layout": {axis: getattr(layout, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "vpp")},
        "num_microbatches": job.microbatches,
        "started_unix_ns": STARTED_UNIX_NS,
        "model": {"layers": job.layers * layout.pp * layout.vpp},
        "ranks": [{"rank": rank, **_where(layout, rank)} for rank in range(layout.world_size)],
    }


def rank_facts(layout: Layout, rank: int, shown: int) -> dict[str, Any]:
    """For the first note of each of a rank's files; its clock showed ``shown`` (ns) at the beginning."""
    where = _where(layout, rank)
    return {
        "rank": rank,
        **where,
        "pid": 1000 + rank,
        "boot_id": f"simulated-{where['host']}",
        "clock": "simulated",
        "session": 0,
        "simulated": True,
        "threads": {"0": "MainThread"},
        "monotonic_ns": shown,
        "unix_ns": STARTED_UNIX_NS,
        "within_ns": 200,
    }


def group_tables(layout: Layout, names: Sequence[str]) -> list[dict[int, Group]]:
    """Of each rank: its groups of more than one, by the number that their kind has in all files."""
    made: list[dict[int, Group]] = [{} for _ in range(layout.world_size)]
    for number, name in enumerate(names, 1):
        for row in layout.members(name).tolist():
            group = Group(name=name, ranks=tuple(row))
            for rank in row if len(row) > 1 else ():
                made[rank][number] = group
    return made


def _where(layout: Layout, rank: int) -> dict[str, Any]:
    host = layout.host_of(rank)
    return {"host": layout.host_name(host), "node": host, **layout.coordinates(rank)}
