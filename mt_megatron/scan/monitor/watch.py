"""Watches a run from outside while it trains.

``python -m mt_megatron.scan.monitor.watch RUN --parent-pid N``

A process of low priority that reads what the ranks append to their traces, judges the last steps with the
same code as the report, and writes what it finds to ``RUN/scan/findings.jsonl``. It never touches the
training processes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np

from mt_megatron.errors import MtMegatronError, ScanError
from mt_megatron.scan.analysis.step_features import RankSteps
from mt_megatron.scan.analysis.trace import Place, places_of
from mt_megatron.scan.clock.fit import Clocks, fit_clocks
from mt_megatron.scan.diagnose.hangs import find_hang
from mt_megatron.scan.diagnose.run import Diagnoser, read_part
from mt_megatron.scan.findings.finding import SURE, Finding
from mt_megatron.scan.findings.text import only_host
from mt_megatron.scan.format.run_files import RunFiles, append_record, read_run, run_files

from .alert_policy import AT_ONCE, Telling
from .alerts import Alerts, say_line
from .child_process import hear_signals, is_alive
from .incremental_reader import RankTail
from .metrics_endpoint import LOOPBACK
from .watcher_process import WEBHOOK_VARIABLE

WINDOW = 80
"""Steps that are judged together."""

WARM_UP = 8
"""First steps of a session that are not judged: caches fill, connections find their pace."""

FEWEST_STEPS = 8
"""Of fewer steps nobody knows what is usual."""

LOOKS = 50
"""The last steps are judged again and again; the bar is as for this many independent looks."""

CLOCKS_EVERY_S = 60.0

LOST_AFTER_S = 180.0
"""A rank that wrote nothing for so long, while others took ``LOST_STEPS`` steps more, keeps no trace: nobody
can be so far ahead of one that hangs. On NFS a new file may be seen a minute late."""

LOST_STEPS = 3

LATE_S = 2.0
"""Seconds lost in a look or a nap from which on this process was stopped, perhaps with its whole machine."""

WRITE_WITHIN_S = 2.0
"""Ranks that were stopped with it have written by then: nobody is looked at sooner."""

HELD_BYTES = 1 << 30
LEAST_HELD_BYTES = 2 << 20
"""What the records in hand of all ranks together may take, and of each at least."""


class Watch:
    """One run. ``look`` once in a while; what is found is in the file and told by ``alerts``."""

    def __init__(self, files: RunFiles, alerts: Alerts | None = None, *, hang_after_s: float = 5.0) -> None:
        self._files = files
        self._alerts = alerts
        self._hang_after_ns = int(hang_after_s * 1e9)
        self._tails: dict[int, RankTail] = {}
        self._reset(-1)

    def _reset(self, session: int) -> None:
        self._session = session
        self._since = time.monotonic()
        self._lost: set[int] = set()
        self._clocks = Clocks(reference=0)
        self._clocks_at = -1e9
        self._places: dict[int, Place] = {}
        self._diagnoser: Diagnoser | None = None
        self._done: int | None = None
        self._first: int | None = None
        self._hung: tuple[object, ...] | None = None
        self._telling = Telling()

    def look(self, *, final: bool = False) -> list[Finding]:
        """Take in what is new and judge it; what is found for the first time is told and returned."""
        for rank in self._files.ranks():
            if rank not in self._tails:
                self._tails[rank] = RankTail(self._files.rank_folder(rank), rank)
        for rank, tail in self._tails.items():
            if rank not in self._lost:
                tail.most_bytes = max(LEAST_HELD_BYTES, HELD_BYTES // len(self._tails))
                with contextlib.suppress(OSError):  # of this rank alone; it is lost if that goes on
                    tail.poll()
        session = max((tail.session for tail in self._tails.values()), default=-1)
        if session > self._session:
            self._reset(session)
        tails = {rank: tail for rank, tail in self._tails.items() if tail.session == self._session}
        self._hear_endings(tails)
        self._lose([rank for rank, tail in tails.items() if self._is_lost(tail, tails)])
        tails = {rank: tail for rank, tail in tails.items() if rank not in self._lost}
        if not tails or not self._know_places(tails):
            return []
        told = []
        hang = self._hang(tails)
        hung = None if hang is None else (hang.ranks, hang.details.get("seq"))
        # Where nobody is missing it may be that the end is not written yet: the next look tells.
        if hang is not None and (hang.confidence >= AT_ONCE or hung == self._hung):
            told += self._tell(self._telling.hang(hang))
        self._hung = hung
        if self._take_steps(tails, final=final):
            told += self._tell(self._judge(final=final))
        return told

    def _hear_endings(self, tails: dict[int, RankTail]) -> None:
        ended = {rank: tail.ended for rank, tail in tails.items() if tail.ended is not None}
        if ended and self._alerts is not None:
            self._alerts.recording_ended(
                ended, {rank: str(tails[rank].meta.get("host", "")) for rank in ended}
            )
        # Nothing more will come of them: nobody waits for their steps.
        self._lost.update(rank for rank, each in ended.items() if each.how == "failed")

    def _is_lost(self, tail: RankTail, tails: dict[int, RankTail]) -> bool:
        if tail.rank in self._lost or time.monotonic() - tail.fresh < LOST_AFTER_S:
            return False
        return tail.step + LOST_STEPS <= max(other.step for other in tails.values())

    def _lose(self, ranks: list[int]) -> None:
        """Wait no longer for their steps, for which those of all others would pile up here."""
        self._lost.update(ranks)
        if ranks:
            few = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
            say_line(
                f"scan: {len(ranks)} rank(s) write no trace that can be read here ({few}): they are not "
                "judged, the others are"
            )

    def _know_places(self, tails: dict[int, RankTail]) -> bool:
        """Whether all ranks of the run have begun to write; clocks are fitted now and then."""
        now = time.monotonic()
        if self._diagnoser is not None and now - self._clocks_at < CLOCKS_EVERY_S:
            return True
        try:
            facts = read_run(self._files)
        except ScanError:
            return False
        missing = set(range(int(facts.get("world_size", 1)))) - tails.keys() - self._lost
        if self._diagnoser is None and missing:
            if now - self._since < LOST_AFTER_S:
                return False
            self._lose(sorted(missing))
        self._clocks = fit_clocks({rank: tail.trace for rank, tail in tails.items()}, causality=False)
        self._clocks_at = now
        self._places = places_of(facts, {rank: tail.meta for rank, tail in tails.items()})
        if self._diagnoser is None:
            self._diagnoser = Diagnoser(self._places, self._clocks, looks=LOOKS)
        else:
            self._diagnoser.clocks = self._clocks
        return True

    def _take_steps(self, tails: dict[int, RankTail], *, final: bool) -> bool:
        """Feed the steps that every rank has finished and left; whether there were any."""
        assert self._diagnoser is not None
        ready = []
        for tail in tails.values():
            usable = tail.steps_done if final else tail.steps_whole
            if not len(usable):
                return False
            ready.append(int(usable[-1]))
        last = min(ready)
        if self._done is not None and last <= self._done:
            return False
        for rank, tail in tails.items():
            steps_of, exchanges, _ = read_part(rank, tail.part(last), self._clocks)
            self._diagnoser.feed(_until(steps_of, last), exchanges)
            if self._first is None and len(steps_of.iteration):
                self._first = int(steps_of.iteration[0])
        self._diagnoser.settle()
        self._done = last
        self._diagnoser.forget(last - WINDOW)
        return True

    def _judge(self, *, final: bool) -> list[Finding]:
        assert self._diagnoser is not None and self._done is not None
        first = max((self._first or 0) + WARM_UP, self._done - WINDOW)
        without = self._telling.over(self._done)
        table = self._diagnoser.table(first, self._done, without)
        if self._alerts is not None and table.iteration.size:
            seconds = float(np.nanmedian(table.columns["step"][:, -1])) / 1e9
            self._alerts.progress(step=self._done, step_seconds=seconds, ranks_seen=len(table.ranks))
        found = self._diagnoser.findings(first_step=first, last_step=self._done, without=without)
        if self._alerts is not None:
            self._alerts.standing([each for each in found if each.confidence >= SURE], step=self._done)
        if self._done - first < FEWEST_STEPS and not final:
            return []
        return self._telling.news(found, step=self._done, sure=final)

    def _hang(self, tails: dict[int, RankTail]) -> Finding | None:
        if not any(tail.waits for tail in tails.values()) and not self._stands(tails):
            return None
        ends = {rank: tail.end(self._clocks) for rank, tail in tails.items()}
        # Nobody may write any more: then this process's clock says how long.
        silent = time.monotonic() - max(tail.fresh for tail in tails.values())
        now = max(end.last_seen for end in ends.values()) + int(silent * 1e9)
        found = find_hang(ends, self._places, now=now, after=self._hang_after_ns)
        # Where a rank without a trace is, nobody knows.
        return None if found is not None and self._lost & set(found.ranks) else found

    def _stands(self, tails: dict[int, RankTail]) -> bool:
        """Whether nobody gets on, it may be: half the time is left to look closer."""
        moved = [tail.moved for tail in tails.values() if tail.ended is None]
        return bool(moved) and time.monotonic() - max(moved) > self._hang_after_ns / 2e9

    def _tell(self, news: list[Finding]) -> list[Finding]:
        for each in news:
            self._write(each)
        return news

    def _write(self, finding: Finding) -> None:
        # A hang is in a step that does not end.
        step = finding.last_step if self._done is None else max(self._done, finding.last_step)
        at = time.time()
        record = {**finding.to_dict(), "time_unix": at, "named_at_step": step}
        try:
            append_record(self._files.findings, record)
        except OSError as error:
            # A full disk, say: whoever reads the log is told all the same.
            say_line(f"scan: a finding is not in {self._files.findings}: {error}")
        if self._alerts is not None:
            one_host = only_host(place.host for place in self._places.values())
            self._alerts.finding(finding, named_at_step=step, time_unix=at, one_host=one_host)


def _until(steps: RankSteps, last: int) -> RankSteps:
    keep = steps.iteration <= last
    return replace(
        steps,
        iteration=steps.iteration[keep],
        begin=steps.begin[keep],
        end=steps.end[keep],
        columns={name: values[keep] for name, values in steps.columns.items()},
    )


def main(arguments: list[str] | None = None) -> int:
    """Watch until the parent is gone or a signal ends it; what is in hand is judged a last time."""
    parser = argparse.ArgumentParser(prog="python -m mt_megatron.scan.monitor.watch", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, or its 'scan' folder")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    parser.add_argument("--period", type=float, default=0.5, help="seconds between two looks")
    parser.add_argument(
        "--hang-seconds", type=float, default=5.0, help="open operations older than this hang"
    )
    parser.add_argument("--webhook", default=os.environ.get(WEBHOOK_VARIABLE))
    parser.add_argument("--prometheus-port", type=int)
    parser.add_argument("--prometheus-address", default=LOOPBACK)
    parser.add_argument("--prometheus-host", action="append", default=[], help="a name that may be asked for")
    options = parser.parse_args(arguments)
    files = run_files(options.run)
    ended = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    # Schedulers send it to all processes of a job; ranks end after their step by it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    hear_signals()
    with contextlib.suppress(OSError):
        os.nice(10)
    try:
        alerts = Alerts(
            files.root,
            webhook=options.webhook,
            prometheus_port=options.prometheus_port,
            prometheus_address=options.prometheus_address,
            prometheus_hosts=options.prometheus_host,
        )
    except MtMegatronError as error:
        print(f"scan: {error}", file=sys.stderr)
        return 2
    with alerts:
        watch = Watch(files, alerts, hang_after_s=options.hang_seconds)
        say_new = functools.lru_cache(maxsize=1)(say_line)

        def look(*, final: bool = False) -> None:
            try:
                watch.look(final=final)
            except OSError as error:  # storage that is away for a moment, or no file can be opened
                say_new(f"scan: the trace cannot be read now ({error}); it is tried again")

        while not ended and (options.parent_pid is None or is_alive(options.parent_pid)):
            begun, used = time.monotonic(), time.process_time()
            look()
            took = time.process_time() - used
            # At most a tenth of a processor, whatever the world's size.
            until = begun + max(options.period, 10.0 * took)
            lost = time.monotonic() - begun - took
            while not ended:
                now = time.monotonic()
                if lost > LATE_S:
                    until = max(until, now + WRITE_WITHIN_S)
                if now >= until:
                    break
                time.sleep(min(0.1, options.period))
                lost = time.monotonic() - now
        look(final=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
