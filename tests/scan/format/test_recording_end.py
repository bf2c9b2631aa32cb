"""A rank whose recording ended says when and why, everybody who looks is told, and nobody blames it."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.cli.scan.status import text
from mt_megatron.scan.diagnose.hangs import CHECKPOINT_PATIENCE, find_hang
from mt_megatron.scan.diagnose.run import diagnose
from mt_megatron.scan.findings.text import headline, next_step
from mt_megatron.scan.format.recording_end import Ended, Ending, ended_of, read_ended
from mt_megatron.scan.format.run_files import run_files
from mt_megatron.scan.format.segments import read_rank
from mt_megatron.scan.monitor.alerts import Alerts
from mt_megatron.scan.monitor.incremental_reader import RankTail
from mt_megatron.scan.monitor.status import run_status
from mt_megatron.scan.monitor.watch import Watch
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.scan.report.gather import ReportFiles, write_report
from tests.scan.diagnose.test_hang_progress import NOW, SECOND, end
from tests.scan.handmade import HandmadeRun, write_handmade
from tests.scan.recordings import step

WHY = "OSError: [Errno 28] No space left on device"


def ended(how: Any = "failed") -> Ended:
    return Ended(
        how=how, why=WHY if how == "failed" else "", iteration=3, time=NOW, time_unix=1.8e9, session=0
    )


def fail(recorder: Recorder, folder: Path) -> None:
    recorder._fail(OSError(28, "No space left on device"))
    until = time.monotonic() + 60
    while read_ended(folder, recorder._ending._session) is None and time.monotonic() < until:  # type: ignore[union-attr]
        time.sleep(0.01)
    # Where the disk fails it is this thread that notices, and it ends with that.
    assert recorder._writer is not None and recorder._writer.stop(60)


def test_a_recorder_says_how_it_ended_and_one_that_was_killed_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "scan" / "rank-00000"
    for session, how in enumerate(("closed", "failed", None)):
        recorder = Recorder(tmp_path, rank=0)
        recorder.start()
        step(4)
        room = (folder / "ended.json").stat()
        assert (room.st_size, room.st_mode & 0o777) == (4096, 0o600)
        assert read_ended(folder, session) is None, "it records; what the session before said is not its word"
        if how == "failed":
            fail(recorder, folder)
        if how is not None:
            recorder.close()
            said = read_ended(folder, session)
            assert said is not None and (said.how, said.iteration) == (how, 4)
            assert said.why == (WHY if how == "failed" else "")
            assert ended_of(read_rank(folder).notes) == said
        else:
            assert ended_of(read_rank(folder).notes) is None
            recorder.close()


def test_the_room_is_taken_before_and_used_in_place(tmp_path: Path) -> None:
    """What a full disk allows: no byte more than there was."""
    ending = Ending(tmp_path, 0)
    before = (tmp_path / "ended.json").stat()
    ending.say("failed", "x" * 100_000, 7)
    ending.say("closed", "", 8)
    after = (tmp_path / "ended.json").stat()
    assert (after.st_size, after.st_blocks, after.st_ino) == (before.st_size, before.st_blocks, before.st_ino)
    said = read_ended(tmp_path, 0)
    assert said is not None and (said.how, said.iteration, len(said.why)) == ("failed", 7, 1000)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"how": "failed"}', b"\xff" * 10])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ended.json").write_bytes(content)
    assert read_ended(tmp_path, 0) is None


def hang_of(*ends: Any, now: int | None = NOW) -> Any:
    return find_hang({one.rank: one for one in ends}, {}, now=now)


def test_a_rank_without_records_is_not_blamed() -> None:
    waits = end(0, last_event=9, waits=9)
    for gone, why in (
        ((), "no records of rank 1: it left no file that can be read"),
        (
            (replace(end(1, last_event=9, entered=False), ended=ended()),),
            f"step 3, 2027-01-15 08:00:00 UTC: {WHY}",
        ),
        ((replace(end(1, last_event=9), ended=ended()),), "no records of rank 1 from then on"),
    ):
        found = hang_of(waits, *gone, now=None)
        assert found is not None and found.ranks == () and found.details["no_records"] == [1]
        assert found.confidence <= 0.5 and any(why in each for each in found.evidence), found.evidence
        assert "no records of rank 1" in headline(found) and headline(found).startswith(
            "The run stands still"
        )
        assert next_step(found).startswith("Look at rank 1, of which nothing is recorded")
    # The controls: the same rank with records is named, whether it stands still or is dead.
    for there in (
        end(1, last_event=9, entered=False),
        replace(end(1, last_event=9), last_seen=NOW - 9 * SECOND),
    ):
        found = hang_of(waits, there, now=None)
        assert found is not None and found.ranks == (1,) and "no_records" not in found.details


def test_one_that_left_in_good_order_is_named_and_says_so() -> None:
    left = replace(end(1, last_event=9, entered=False), ended=ended("closed"), last_seen=NOW - 9 * SECOND)
    found = hang_of(end(0, last_event=9, waits=9), left)
    assert found is not None and found.ranks == (1,)
    assert any(
        "rank 1 has left without entering it: the trace was closed at step 3" in e for e in found.evidence
    )


def test_what_was_open_when_a_recording_ended_says_nothing_of_later() -> None:
    stale = replace(end(0, last_event=30, waits=30), ended=ended())
    assert hang_of(stale, end(1, last_event=0.1)) is None
    assert hang_of(stale) is None
    assert hang_of(replace(stale, ended=None), end(1, last_event=9, entered=False)) is not None, "the control"


def test_a_culprit_on_record_is_named_beside_one_without() -> None:
    group = ("dp", (0, 1, 2))
    waits = end(0, last_event=9, waits=9)
    assert waits.waiting is not None
    waits = replace(waits, waiting=replace(waits.waiting, key=group), reached={group: 7})
    absent = replace(end(1, last_event=9), reached={group: 6})
    found = hang_of(waits, absent)
    assert found is not None and found.ranks == (1,) and found.details["no_records"] == [2]
    found = hang_of(waits, replace(waits, rank=1), now=None)
    assert found is not None and found.ranks == ()


def test_while_the_run_trains_more_patience_is_had_with_the_unknown() -> None:
    """It may write its checkpoint; nobody can see it."""
    assert hang_of(end(0, last_event=9, waits=9)) is None
    patience = CHECKPOINT_PATIENCE * 5 + 1
    assert hang_of(end(0, last_event=patience, waits=patience)) is not None


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hand-made run in which rank 1 does not come; and the same without its files, and with its word."""
    folder = tmp_path_factory.mktemp("hanging") / "run"
    write_handmade(folder, HandmadeRun(hangs=1))
    return folder


def without(run: Path, folder: Path, *, word: bool) -> Path:
    shutil.copytree(run, folder)
    rank = run_files(folder).rank_folder(1)
    if word:
        Ending(rank, 0).say("failed", WHY, 12)
    else:
        shutil.rmtree(rank)
    return folder


def test_report_status_and_diagnosis_say_who_no_longer_recorded(hanging: Path, tmp_path: Path) -> None:
    (named,) = [each for each in diagnose(hanging).findings if each.cause == "hang"]
    assert named.ranks == (1,), "the control"
    lost = without(hanging, tmp_path / "lost", word=False)
    (found,) = [each for each in diagnose(lost).findings if each.cause == "hang"]
    assert found.ranks == () and found.details["no_records"] == [1]
    silent = without(hanging, tmp_path / "silent", word=True)
    report: ReportFiles = write_report(silent)
    hangs = [each for each in report.data.findings if each.cause == "hang"]
    assert [each.ranks for each in hangs] == [()] and 1 not in report.data.verdicts
    assert WHY in report.data.ended[1] and "step 12" in report.data.ended[1]
    page, words = report.html.read_text(), report.markdown.read_text()
    assert (
        "of rank 1 nothing is known from then on" in page
        and "of rank 1 nothing is known from then on" in words
    )
    assert "1 (ended)" in words and "no longer recorded" in page
    status = run_status(silent)
    assert status.not_recording == (1,) and status.absent == ()
    assert "rank 1 (node-1): no longer recorded, tracing ended at step 12" in text(status) and WHY in text(
        status
    )
    status = run_status(lost)
    assert status.absent == (1,) and "no file of rank(s) 1 that can be read" in text(status)
    assert "no longer recorded" not in text(run_status(hanging)), "the control"


def test_a_run_that_is_over_is_told_from_one_that_stands_still(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0)
    recorder.start()
    step(1)
    recorder._writer.flush()  # type: ignore[union-attr]
    assert "the run has ended" not in text(run_status(tmp_path))
    recorder.close()
    assert "all ranks have closed their traces: the run has ended" in text(run_status(tmp_path))


def test_a_tail_learns_of_it_once_nothing_more_comes(
    hanging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = without(hanging, tmp_path / "tail", word=True)
    tail = RankTail(run_files(silent).rank_folder(1), 1)
    tail.poll()
    assert tail.ended is None, "it has only just written"
    monkeypatch.setattr("mt_megatron.scan.monitor.incremental_reader._QUIET_S", -1.0)
    tail.poll()
    assert tail.ended is not None and ended_of(tail.trace.notes) == tail.ended


def test_it_is_an_alert_of_its_own_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    with Alerts(tmp_path, say=said.append) as alerts:
        there = {3: ended(), 4: ended(), 5: ended("closed")}
        assert alerts.recording_ended(there, {3: "node-1", 4: "node-1"})
        assert not alerts.recording_ended(there, {})
        assert "mt_megatron_scan_ranks_not_recording 2.0\n" in alerts.metrics.text()
        assert alerts.recording_ended({**there, 6: replace(ended(), iteration=9)}, {})
        assert not alerts.recording_ended({5: ended("closed")}, {})
        assert "mt_megatron_scan_ranks_not_recording 0.0\n" in alerts.metrics.text()
    assert len(said) == 2
    assert said[0].startswith("scan: Ranks 3, 4 (node-1) no longer recorded: tracing ended at step 3")
    assert WHY in said[0] and "Training goes on" in said[0]
    first, second = (json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines())
    assert first["recording_ended"]["ranks"] == [3, 4] and second["recording_ended"]["ranks"] == [6]


def test_the_watcher_tells_it_once_and_waits_for_nobody_who_is_gone(
    hanging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mt_megatron.scan.monitor.incremental_reader._QUIET_S", -1.0)
    files = run_files(without(hanging, tmp_path / "watched", word=True))
    said: list[str] = []
    with Alerts(files.root, say=said.append) as alerts:
        watch = Watch(files, alerts)
        found = [each for _ in range(3) for each in watch.look()]
    assert [line for line in said if "no longer recorded" in line] == [said[0]]
    assert "Rank 1 (node-1) no longer recorded" in said[0]
    assert 1 not in {rank for each in found for rank in each.ranks}
    named = Watch(run_files(hanging))
    assert (1,) in [each.ranks for _ in range(3) for each in named.look()], "the control"
