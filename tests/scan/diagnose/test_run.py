"""Whole traces, from files to findings: inherited lateness, missing and torn files, hangs, the watcher."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.errors import ScanError
from mt_megatron.scan.analysis.trace import open_trace
from mt_megatron.scan.clock.fit import Clocks
from mt_megatron.scan.diagnose.run import Diagnosis, diagnose
from mt_megatron.scan.export.rank_stream import pieces
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.format.records import COUNTER, FLUSH_SECONDS, KIND, OPEN, SPAN
from mt_megatron.scan.format.run_files import read_run, run_files, segment_path, segment_paths, write_run
from mt_megatron.scan.format.segments import Group, SegmentWriter, read_rank
from mt_megatron.scan.monitor import watch as watch_module
from mt_megatron.scan.monitor.alerts import Alerts
from mt_megatron.scan.monitor.child_process import is_alive
from mt_megatron.scan.monitor.incremental_reader import RankTail
from mt_megatron.scan.monitor.watch import Watch
from tests.scan.handmade import DP, MS, NAME, STRINGS, HandmadeRun, write_handmade


def named(found: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.cause, each.ranks) for each in found.findings]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 2, of the second stage, computes 1.2 times as long from step 9 on."""
    run = tmp_path_factory.mktemp("slow")
    write_handmade(run, HandmadeRun(steps=24, slow_rank=2, factor=1.2, slow_from=9))
    return run


def test_blames_the_slow_rank_and_nobody_who_waits_for_it(slow: Path) -> None:
    found = diagnose(slow)
    assert named(found) == [("slow_compute", (2,))]
    (one,) = found.findings
    assert one.lateness == "late_arrival"
    assert (one.first_step, one.last_step) == (9, 24)
    assert one.host == "node-0"
    assert 0.05 < one.lost_fraction < 0.2
    assert json.dumps(found.to_dict())
    assert found.ranks == (0, 1, 2, 3) and found.steps[-1] == 24


def test_an_even_run_has_no_findings(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=24))
    assert named(diagnose(tmp_path)) == []


def test_steps_asked_for_are_the_steps_looked_at(slow: Path) -> None:
    assert named(diagnose(slow, first_step=1, last_step=8)) == []
    assert diagnose(slow, first_step=3, last_step=8).steps == (3, 4, 5, 6, 7, 8)


def test_clocks_that_are_apart_change_nothing(tmp_path: Path) -> None:
    made = HandmadeRun(steps=24, slow_rank=2, factor=1.2, slow_from=9, offsets={1: 10**9, 2: -(10**9)})
    write_handmade(tmp_path, made)
    assert named(diagnose(tmp_path)) == [("slow_compute", (2,))]


def test_a_missing_rank_and_a_torn_file_are_said_and_survived(slow: Path, tmp_path: Path) -> None:
    run = tmp_path / "torn"
    shutil.copytree(slow, run)
    files = run_files(run)
    shutil.rmtree(files.rank_folder(1))
    torn = segment_paths(files.rank_folder(0))[0]
    torn.write_bytes(torn.read_bytes()[:-100])
    found = diagnose(run)
    assert named(found) == [("slow_compute", (2,))]
    assert found.missing == (1,)
    assert any("left no readable file" in note for note in found.notes)
    assert any("no whole block" in note for note in found.notes)


def test_a_damaged_segment_of_one_rank_spoils_neither_report_nor_watcher(slow: Path, tmp_path: Path) -> None:
    run = tmp_path / "zeros"
    shutil.copytree(slow, run)
    files = run_files(run)
    segment_path(files.rank_folder(1), 1).write_bytes(bytes(4096))
    (read,) = [piece for piece in pieces(open_trace(run), 1) if len(piece.spans)]
    assert len(read.spans) == len(read_rank(files.rank_folder(1)).spans)
    found = diagnose(run)
    assert named(found) == [("slow_compute", (2,))] and found.ranks == (0, 1, 2, 3)
    (note,) = found.notes
    assert "rank-00001/000001.scan is no segment" in note
    watch = Watch(files)
    told = watch.look() + watch.look(final=True)
    assert [(each.cause, each.ranks) for each in told] == [("slow_compute", (2,))]
    shutil.rmtree(files.rank_folder(1))
    files.rank_folder(1).mkdir()
    segment_path(files.rank_folder(1), 1).write_bytes(bytes(4096))
    found = diagnose(run)
    assert found.missing == (1,)
    assert any("rank-00001/000001.scan is no segment" in note for note in found.notes)


def test_the_watcher_tries_a_file_again_that_it_could_not_read(
    slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path, offset: int = 0) -> Iterator[tuple[int, Any, int]]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    tail = RankTail(run_files(slow).rank_folder(0), 0)
    with monkeypatch.context() as patched:
        patched.setattr("mt_megatron.scan.monitor.incremental_reader.read_blocks", stale)
        tail.poll()
    assert tail.step == 0
    tail.poll()
    assert tail.step == 24


def test_the_watcher_outlives_storage_that_is_away_for_a_moment(
    slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "away"
    shutil.copytree(slow, run)
    looks: list[bool] = []
    real, polled = Watch.look, RankTail.poll

    def look(self: Watch, *, final: bool = False) -> list[Finding]:
        looks.append(final)
        if len(looks) <= 3:
            raise OSError(errno.ESTALE if len(looks) < 3 else errno.EMFILE, f"away {len(looks) // 3}")
        return real(self, final=final)

    def poll(self: RankTail) -> None:
        if self.rank == 1 and len(looks) == 4:
            raise OSError(errno.EIO, "of one rank")
        polled(self)

    monkeypatch.setattr(Watch, "look", look)
    monkeypatch.setattr(RankTail, "poll", poll)
    monkeypatch.setattr(watch_module, "is_alive", lambda pid: len(looks) < 5)
    for module, name in ((watch_module, "hear_signals"), (signal, "signal"), (os, "nice")):
        monkeypatch.setattr(module, name, lambda *_: None)
    assert watch_module.main([str(run), "--parent-pid", "1", "--period", "0.01"]) == 0
    assert looks == [False] * 5 + [True]
    said = capsys.readouterr().err
    assert said.count("away 0") == said.count("away 1") == 1 and "it is tried again" in said
    found = [json.loads(line) for line in run_files(run).findings.read_text().splitlines()]
    assert [(each["cause"], each["ranks"]) for each in found] == [("slow_compute", [2])]


def test_without_run_json_places_come_from_the_ranks(slow: Path, tmp_path: Path) -> None:
    run = tmp_path / "headless"
    shutil.copytree(slow, run)
    run_files(run).run_json.unlink()
    found = diagnose(run)
    assert any("run.json" in note for note in found.notes)
    assert found.ranks == (0, 1, 2, 3)


def test_no_trace_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ScanError, match="expected"):
        diagnose(tmp_path)


def _add_open(run: Path, rank: int, *, seq: int, group: int, ranks: tuple[int, ...], alive_s: float) -> None:
    """An operation that has begun and not ended; the rank goes on beating for ``alive_s``."""
    folder = run_files(run).rank_folder(rank)
    recorded = read_rank(folder)
    begin = int(recorded.spans["end"].max()) + MS
    span = np.zeros(1, dtype=SPAN)
    span["begin"], span["end"], span["kind"] = begin, OPEN, KIND["collective"]
    span["seq"], span["group"], span["iteration"] = seq, group, 25
    span["name"], span["peer"], span["bytes"] = NAME["all_reduce"], -1, 4096
    writer = SegmentWriter(segment_path(folder, 1), rank, recorded.meta)
    writer.strings(list(STRINGS))
    writer.groups({group: Group(name="dp", ranks=ranks)})
    if seq >= 0:
        writer.spans(span)
    counters = recorded.counters[-1:].copy()
    counters["time"] = begin + int(alive_s * 1e9)
    writer.counters(counters)
    if seq < 0:
        writer.note({"what": "stack", "stacks": {"MainThread": ["train.py:7 in lost"]}})
    writer.close()


def test_a_hang_names_the_rank_that_did_not_come(slow: Path, tmp_path: Path) -> None:
    run = tmp_path / "hang"
    shutil.copytree(slow, run)
    _add_open(run, 0, seq=24, group=DP, ranks=(0, 1), alive_s=8.0)
    _add_open(run, 1, seq=-1, group=DP, ranks=(0, 1), alive_s=8.0)
    found = diagnose(run).findings[0]
    assert (found.cause, found.ranks, found.group) == ("hang", (1,), "dp")
    assert found.details["collective"] == "all_reduce" and found.details["seq"] == 24
    assert found.details["stacks"]["1"] == {"MainThread": ["train.py:7 in lost"]}
    assert any("alive" in line for line in found.evidence)


def test_a_rank_that_went_silent_is_named_as_such_and_a_short_wait_is_no_hang(
    slow: Path, tmp_path: Path
) -> None:
    for seconds, expected in ((8.0, ("hang", (1,))), (2.0, None)):
        run = tmp_path / f"silent{seconds}"
        shutil.copytree(slow, run)
        _add_open(run, 0, seq=24, group=DP, ranks=(0, 1), alive_s=seconds)
        hangs = [each for each in diagnose(run).findings if each.cause == "hang"]
        assert [(each.cause, each.ranks) for each in hangs] == ([expected] if expected else [])
        assert all("stopped or dead" in " ".join(each.evidence) for each in hangs)


def test_the_watcher_says_the_same_while_the_trace_grows(slow: Path, tmp_path: Path) -> None:
    files = run_files(tmp_path)
    files.root.mkdir()
    shutil.copy(run_files(slow).run_json, files.run_json)
    whole = {rank: segment_paths(run_files(slow).rank_folder(rank))[0].read_bytes() for rank in range(4)}
    for rank in whole:
        files.rank_folder(rank).mkdir()
    watch = Watch(files)
    told = []
    for part in range(1, 5):
        for rank, data in whole.items():
            segment_path(files.rank_folder(rank), 0).write_bytes(data[: len(data) * part // 4])
        told += watch.look()
    told += watch.look(final=True)
    assert [(each.cause, each.ranks) for each in told] == [("slow_compute", (2,))]
    (line,) = files.findings.read_text().splitlines()
    assert json.loads(line)["named_at_step"] <= 24 and json.loads(line)["ranks"] == [2]
    assert files.findings.stat().st_mode & 0o777 == 0o600


def test_the_watcher_waits_for_what_a_device_is_timed_with(tmp_path: Path) -> None:
    """A recorder writes them one flush after their step: device times are read when the device is done."""
    whole = tmp_path / "whole"
    write_handmade(whole, HandmadeRun(steps=44, slow_rank=2, factor=1.2, slow_from=9))
    files = run_files(tmp_path)
    files.root.mkdir()
    shutil.copy(run_files(whole).run_json, files.run_json)
    flush = round(1e9 * FLUSH_SECONDS)
    writers = {}
    for rank in range(4):
        recorded = read_rank(run_files(whole).rank_folder(rank))
        files.rank_folder(rank).mkdir()
        meta = {**recorded.meta, "device_type": "cuda"}
        writer = SegmentWriter(segment_path(files.rank_folder(rank), 0), rank, meta)
        writer.strings(recorded.strings)
        writer.groups(recorded.groups)
        spans = recorded.spans[np.argsort(recorded.spans["end"], kind="stable")]
        timed = ~np.isin(spans["kind"], (KIND["step"], KIND["data"]))
        for name in ("begin", "end"):
            spans[f"device_{name}"][timed] = spans[name][timed]
        writers[rank] = (writer, spans, spans["end"] + np.where(timed, flush, 0))
    begin = 1_000 * MS
    end = max(int(spans["end"].max()) for _, spans, _ in writers.values())
    watch = Watch(files)
    told = []
    for now in range(begin + flush, end, flush):
        # The ranks' files grow one after the other, and the watcher looks in between.
        for writer, spans, at in writers.values():
            writer.spans(spans[(at > now - flush) & (at <= now)])
            counter = np.zeros(1, dtype=COUNTER)
            counter["time"], counter["name"] = now, NAME["beat_delay_ns"]
            writer.counters(counter)
            told += watch.look()
    assert [(each.cause, each.ranks) for each in told] == [("slow_compute", (2,))]


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_alert_does_not_ask_to_leave_the_only_host(slow: Path, tmp_path: Path, hosts: int) -> None:
    files = run_files(tmp_path)
    shutil.copytree(run_files(slow).root, files.root)
    facts = read_run(files)
    places = [{**row, "host": f"node-{row['rank'] % hosts}"} for row in facts["ranks"]]
    write_run(files, {**facts, "ranks": places})
    said: list[str] = []
    with Alerts(files.root, say=said.append) as alerts:
        Watch(files, alerts).look(final=True)
    (line,) = said
    assert ("restart without the host" in line) == (hosts > 1)
    assert ("All ranks of this run are on that host" in line) == (hosts == 1)


@pytest.mark.parametrize("from_the_start", [False, True])
def test_a_rank_whose_trace_ends_is_waited_for_no_longer(
    slow: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    from_the_start: bool,
) -> None:
    run = tmp_path / "lost"
    shutil.copytree(slow, run)
    torn = segment_paths(run_files(run).rank_folder(1))[0]
    torn.unlink() if from_the_start else torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 3])
    watch = Watch(run_files(run))
    told = watch.look()
    assert watch._lost == set() and not told
    held = sum(len(tail._spans) for tail in watch._tails.values())
    monkeypatch.setattr("mt_megatron.scan.monitor.watch.LOST_AFTER_S", 0.0)
    _add_open(run, 0, seq=24, group=DP, ranks=(0, 1), alive_s=8.0)
    told = watch.look() + watch.look(final=True)
    assert [(each.cause, each.ranks) for each in told] == [("slow_compute", (2,))], "and no hang of rank 1"
    assert watch._lost == {1} and capsys.readouterr().err.count("1 rank(s) write no trace") == 1
    assert sum(len(tail._spans) for tail in watch._tails.values()) < held / 4


def test_what_nobody_takes_is_bounded_in_bytes(slow: Path) -> None:
    whole = RankTail(run_files(slow).rank_folder(0), 0)
    whole.poll()
    assert whole.given_up == 0 and whole.steps_done.tolist() == list(range(1, 25)), "the control"
    tail = RankTail(run_files(slow).rank_folder(0), 0)
    tail.most_bytes = 100 * SPAN.itemsize
    tail.poll()
    kept = tail.trace.spans
    assert 0 < len(kept) <= 50 and tail.step == 24 and len(tail.trace.counters) <= 100
    assert tail.given_up == len(whole.trace.spans) - len(kept)
    for step in tail.steps_done:
        # Half a step would look like one with less to do.
        same = whole.trace.spans["iteration"] == step
        assert (kept["iteration"] == step).sum() == same.sum()


def test_a_tail_keeps_the_stacks_of_a_hang_however_many_notes_follow(tmp_path: Path) -> None:
    writer = SegmentWriter(segment_path(tmp_path, 0), 0, {"rank": 0, "session": 0})
    tail = RankTail(tmp_path, 0)
    for text in ("early", "late"):
        writer.note({"what": "stack", "stacks": {"MainThread": [text]}})
    for number in range(100):
        writer.note({"what": "device_clock", "uncertainty_ns": number})
    tail.poll()
    notes = {note["what"]: note for note in tail.trace.notes}
    assert len(tail.trace.notes) == 2 and notes["device_clock"]["uncertainty_ns"] == 99
    assert tail.end(Clocks(reference=0)).note == notes["stack"]
    assert notes["stack"]["stacks"] == {"MainThread": ["late"]}
    for number in range(100):
        writer.note({"what": f"mine {number}"})
    writer.close()
    tail.poll()
    assert len(tail.trace.notes) == 64 and tail.trace.notes[-1]["what"] == "mine 99"


def test_the_watcher_tells_a_hang_once(slow: Path, tmp_path: Path) -> None:
    run = tmp_path / "hang"
    shutil.copytree(slow, run)
    _add_open(run, 0, seq=24, group=DP, ranks=(0, 1), alive_s=8.0)
    _add_open(run, 1, seq=-1, group=DP, ranks=(0, 1), alive_s=8.0)
    watch = Watch(run_files(run))
    hangs = [each for _ in range(3) for each in watch.look() if each.cause == "hang"]
    assert [(each.ranks, each.group, each.details["seq"]) for each in hangs] == [((1,), "dp", 24)]
    patient = Watch(run_files(run), hang_after_s=20.0)
    assert not [each for each in patient.look() if each.cause == "hang"]


def test_a_parent_that_nobody_has_asked_for_its_end_is_gone() -> None:
    parent = subprocess.Popen([sys.executable, "-S", "-c", ""])
    try:
        assert is_alive(os.getpid())
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(parent.pid)
    finally:
        parent.wait()
    assert not is_alive(parent.pid)


def test_the_watchers_process_ends_with_its_parent_and_imports_no_torch(slow: Path, tmp_path: Path) -> None:
    run = tmp_path / "watched"
    shutil.copytree(slow, run)
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    command = [sys.executable, "-X", "importtime", "-m", "mt_megatron.scan.monitor.watch", str(run)]
    ended = subprocess.run(
        [*command, "--parent-pid", str(parent.pid)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    loaded = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines() if "|" in line}
    assert "numpy" in loaded and not {"torch", "megatron"} & loaded
    (line,) = run_files(run).findings.read_text().splitlines()
    assert json.loads(line)["cause"] == "slow_compute"


def test_a_scheduler_s_request_to_save_does_not_end_the_watcher(slow: Path, tmp_path: Path) -> None:
    run = tmp_path / "asked"
    shutil.copytree(slow, run)
    command = [sys.executable, "-m", "mt_megatron.scan.monitor.watch", str(run)]
    with subprocess.Popen([*command, "--parent-pid", str(os.getpid())]) as process:
        try:
            until = time.monotonic() + 60
            while not _ignores(process.pid, signal.SIGUSR1):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            process.send_signal(signal.SIGUSR1)
            process.terminate()
            assert process.wait(60) == 0, "ended by SIGTERM, after its last look"
        finally:
            process.kill()
    assert run_files(run).findings.exists()


def _ignores(pid: int, number: int) -> bool:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
