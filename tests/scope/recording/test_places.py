"""Files of a recording that others use too: two jobs in one folder, slow readers, half-made files."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mt_megatron.errors import ScopeError
from mt_megatron.scope.recording import schema as tables
from mt_megatron.scope.recording import transactions
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.sql import query
from mt_megatron.scope.recording.writer import Alert, Writer
from tests.scope.synthetic import RunShape, frames_of, hello, schema, write_run

SHAPE = RunShape(steps=20, tp=1, pp=1, interval=5, tensor_every=0, token_every=0)


def a_writer(run: Path, said: list[str] | None = None) -> Writer:
    files = scope_files(run)
    files.root.mkdir(exist_ok=True)
    say = (said if said is not None else []).append
    return Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26, say=say)


def test_two_jobs_in_one_folder_are_two_sessions(tmp_path: Path) -> None:
    """Their sidecars write the same file in turn; nothing of either is lost or added to the other's."""
    jobs = [
        RunShape(tp=1, pp=1, interval=5, tensor_every=0, token_every=0, session=name, scale=scale)
        for name, scale in (("one", 1.0), ("two", 3.0))
    ]
    writers = [a_writer(tmp_path) for _ in jobs]
    for writer, job in zip(writers, jobs, strict=True):
        writer.tick([(0, hello(job, 0)), (0, schema(job, 0))])
    for step in range(1, 31):
        for writer, job in zip(writers, jobs, strict=True):
            writer.tick([(0, frame) for frame in frames_of(job, 0, step)])
    for writer in writers:
        writer.close()
        assert writer.stopped is None and not writer.lost
    with open_recording(tmp_path) as recording:
        assert [each.name for each in recording.sessions()] == ["one", "two"]
        one, two = (
            recording.series("decoder.layers.1", "activation_rms", session=session) for session in (0, 1)
        )
        assert one.step.tolist() == two.step.tolist() == [5, 10, 15, 20, 25, 30]
        assert one.parts.tolist() == two.parts.tolist() == [1] * 6
        assert two.value == pytest.approx(3 * one.value)
        assert len(recording.steps(session=0).step) == len(recording.steps(session=1).step) == 30


def test_a_writer_knows_what_earlier_ones_recorded(tmp_path: Path) -> None:
    write_run(tmp_path, SHAPE, extras=False)
    files = scope_files(tmp_path)
    (path,) = files.nodes()
    writer = Writer(path, node=0, host="node0", retain_bytes=1 << 26)
    assert dict(writer.before) == {("first", 0): (20, 20)}
    writer.close()
    assert not dict(a_writer(tmp_path).before)


def test_readers_never_see_a_file_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node's file appears while the first one is read: whole, or not at all."""
    write_run(tmp_path, SHAPE, extras=False)
    monkeypatch.setattr("mt_megatron.scope.recording.reader.LOOK_SECONDS", 0.0)
    seen: list[int] = []
    link = tables.os.link

    def looking(draft: Path, path: Path) -> None:
        with open_recording(tmp_path) as recording:
            seen.append(len(recording.nodes()))
        link(draft, path)

    monkeypatch.setattr(tables.os, "link", looking)
    a_writer(tmp_path).close()
    assert seen == [1]
    with open_recording(tmp_path) as recording:
        assert len(recording.nodes()) == 2
    assert not [each for each in scope_files(tmp_path).root.iterdir() if each.name.startswith(".node")]


def test_a_folder_without_hard_links_and_an_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(tables.os, "link", refused)
    files = scope_files(tmp_path)
    files.root.mkdir()
    files.node("a", 0).touch()
    a_writer(tmp_path).close()
    with open_recording(tmp_path) as recording:
        assert recording.sessions() == ()
        with pytest.raises(ScopeError, match="found no rank in the recording"):
            recording.facts()


def test_a_slow_reader_without_a_shared_log_does_not_end_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On network file systems a query holds the writer up: it waits for longer than readers wait."""
    monkeypatch.setattr(tables, "keeps_shared_memory", lambda _: False)
    monkeypatch.setattr(tables, "BUSY_SECONDS", 0.05)
    said: list[str] = []
    writer = a_writer(tmp_path, said)
    writer.tick([(0, hello(SHAPE, 0)), (0, schema(SHAPE, 0))])
    reader = sqlite3.connect(scope_files(tmp_path).nodes()[0], isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM step").fetchone()
    with pytest.raises(sqlite3.OperationalError, match="locked"):  # it does hold others up
        other = sqlite3.connect(scope_files(tmp_path).nodes()[0], timeout=0.05, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(0.5, lambda: reader.execute("COMMIT"))
    timer.start()
    writer.tick([(0, frame) for frame in frames_of(SHAPE, 0, 1)])
    timer.join()
    writer.close()
    assert writer.stopped is None and not said
    assert open_recording(tmp_path).steps().step.tolist() == [1]


def a_held_lock(
    run: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> tuple[Writer, sqlite3.Connection]:
    """A writer without a shared log, which has no patience, and a reader that is in its way."""
    monkeypatch.setattr(tables, "keeps_shared_memory", lambda _: False)
    monkeypatch.setattr(tables, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr("mt_megatron.scope.recording.writer.PAUSE_SECONDS", 0.0)
    for module in (tables, transactions):
        monkeypatch.setattr(module, "WRITER_SECONDS", 0.05)
    writer = a_writer(run, said)
    writer.tick([(0, hello(SHAPE, 0)), (0, schema(SHAPE, 0))])
    reader = sqlite3.connect(scope_files(run).nodes()[0], isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM step").fetchone()
    return writer, reader


def test_a_reader_that_outlasts_the_writer_s_patience_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    writer, reader = a_held_lock(tmp_path, monkeypatch, said)
    for step in (5, 6):
        writer.tick([(0, frame) for frame in frames_of(SHAPE, 0, step)])
    alert = Alert(step=5, kind="band", path="", statistic="loss", value=9.0, low=1.0, high=2.0, text="high")
    writer.alert(alert, (SHAPE.session, 0))
    reader.execute("COMMIT")
    with open_recording(tmp_path) as recording:
        assert recording.last_step() is None, "it does hold others up"
    writer.tick([(0, frame) for frame in frames_of(SHAPE, 0, 7)])
    writer.close()
    assert writer.stopped is None and not writer.lost
    assert len(said) == 1 and "is locked" in said[0] and "training goes on" in said[0]
    with open_recording(tmp_path) as recording:
        assert recording.steps().step.tolist() == [5, 6, 7]
        assert recording.series("decoder.layers.1", "activation_rms").parts.tolist() == [1]
        assert [each.text for each in recording.alerts()] == ["high"]


def test_frames_that_wait_for_a_lock_are_bounded_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors go first, then statistics and steps; what later frames need is kept."""
    monkeypatch.setattr(transactions, "MOST_HELD_BYTES", 64 * 2**10)
    said: list[str] = []
    writer, reader = a_held_lock(tmp_path, monkeypatch, said)
    shape = RunShape(steps=200, tp=1, pp=1, interval=5, tensor_every=1, token_every=0)
    sent = 0
    for step in range(1, 101):
        frames = [(0, frame) for frame in frames_of(shape, 0, step)]
        if step == 90:
            frames.append((0, {"k": "back", "first": 91, "attempt": 1}))
        sent += len(frames)
        writer.tick(
            [
                (rank, {**frame, "attempt": int(step > 90)} if frame["k"] != "back" else frame)
                for rank, frame in frames
            ]
        )
    reader.execute("COMMIT")
    writer.close()
    lost = writer.lost[0][0]
    assert writer.stopped is None and 0 < lost < sent
    with open_recording(tmp_path) as recording:
        steps = recording.steps(session=0).step.tolist()
        assert steps == list(range(1, len(steps) + 1)) and 10 < len(steps) < 90
        assert len(recording.tensors()) < len(steps)
        assert [each.first_step for each in recording.sessions()] == [1, 91]


def test_a_lock_that_lasts_to_the_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writer, _ = a_held_lock(tmp_path, monkeypatch, said)
    frames = [(0, frame) for frame in frames_of(SHAPE, 0, 5)]
    writer.tick(frames)
    writer.close()
    assert writer.lost[0][0] == len(frames)
    assert f"was locked to the end: {len(frames)} frames are left out" in said[-1]


def test_readers_say_that_a_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with the file then: it need not be copied again."""
    writer, reader = a_held_lock(tmp_path, monkeypatch, [])
    reader.execute("COMMIT")
    with open_recording(tmp_path) as recording:
        writer._connection.execute("BEGIN EXCLUSIVE")
        for read in (
            lambda: open_recording(tmp_path),
            recording.steps,
            lambda: query(recording, "select * from steps"),
        ):
            with pytest.raises(ScopeError, match=r"is locked: .* Try again") as caught:
                read()
            assert "copy it again" not in str(caught.value)
        writer._connection.execute("ROLLBACK")
        assert query(recording, "select * from steps").rows == []
    writer.close()


def test_an_error_of_any_kind_ends_the_recording_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    writer = a_writer(tmp_path, said)
    writer.tick([(0, hello(SHAPE, 0)), (0, schema(SHAPE, 0))])

    def broken(*_: object) -> None:
        raise RuntimeError("a mistake of the code")

    monkeypatch.setattr(writer, "_step", broken)
    for step in (1, 2):
        writer.tick([(0, frame) for frame in frames_of(SHAPE, 0, step)])
    writer.close()
    assert said == [
        f"scope: {scope_files(tmp_path).nodes()[0]} is written no further (RuntimeError: a mistake of the "
        "code); training goes on, what was recorded stays"
    ]
    assert writer.lost == {0: (2, 0)}


def posix_locks(path: Path) -> list[str]:
    """This process's locks on ``path``, as the kernel has them."""
    of = f":{path.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return [line.partition("POSIX")[2] for line in lines if of in line and f" {os.getpid()} " in line]


@pytest.mark.parametrize("has_shared_log", [True, False])
def test_a_reader_in_the_writer_s_process_leaves_its_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_shared_log: bool
) -> None:
    """The sidecar of node 0 reads its own file for page and alerts. Locks end with any closed descriptor."""
    monkeypatch.setattr(tables, "keeps_shared_memory", lambda _: has_shared_log)
    writer = a_writer(tmp_path)
    writer.tick([(0, hello(SHAPE, 0))])
    (path,) = scope_files(tmp_path).nodes()
    if not has_shared_log:
        writer._connection.execute("BEGIN IMMEDIATE")
    held = posix_locks(path)
    assert held
    tables.connect_reader(path).close()
    assert posix_locks(path) == held
    # Also where a private copy is read.
    of_copy = tables._read_only
    monkeypatch.setattr(tables, "_read_only", lambda at, of=None: of_copy(at, of) if of else fails())
    tables.connect_reader(path).close()
    assert posix_locks(path) == held
    if not has_shared_log:
        writer._connection.execute("COMMIT")
    writer.close()


def fails() -> sqlite3.Connection:
    raise sqlite3.OperationalError("attempt to write a readonly database")


def test_who_opens_a_live_recording_to_write_takes_nothing_of_it(tmp_path: Path) -> None:
    """As SQLite's shell or the sidecar of the start before does: the last one that closes removes the log."""
    writer = a_writer(tmp_path)
    writer.tick([(0, hello(SHAPE, 0)), (0, schema(SHAPE, 0))])
    (path,) = scope_files(tmp_path).nodes()
    with open_recording(tmp_path):
        other = (
            f"import sqlite3; c = sqlite3.connect({str(path)!r}); c.execute('SELECT * FROM step'); c.close()"
        )
        subprocess.run([sys.executable, "-c", other], check=True)
        for step in (1, 2, 3):
            writer.tick([(0, frame) for frame in frames_of(SHAPE, 0, step)])
        count = (
            "import sys, sqlite3; c = sqlite3.connect(sys.argv[1]); "
            "print(c.execute('SELECT count(*) FROM step').fetchone())"
        )
        seen = subprocess.run([sys.executable, "-c", count, path], capture_output=True, text=True, check=True)
    assert seen.stdout == "(3,)\n"
    writer.close()


def test_a_writer_killed_in_a_transaction_is_read_on_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "keeps_shared_memory", lambda _: False)
    (tmp_path / "one").mkdir()
    writer = a_writer(tmp_path / "one")
    writer.tick([(0, hello(SHAPE, 0)), (0, schema(SHAPE, 0))])
    writer.tick([(0, frame) for frame in frames_of(SHAPE, 0, 1)])
    (path,) = scope_files(tmp_path / "one").nodes()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with open_recording(tmp_path / "two") as recording:
        assert recording.steps().step.tolist() == [1]
        connection = writer._connection
        connection.execute("PRAGMA cache_size=10")
        connection.execute("BEGIN EXCLUSIVE")
        connection.executemany("INSERT INTO path(text) VALUES (?)", ((f"{n}" * 50,) for n in range(2000)))
        for suffix in ("-journal", ""):  # as the kill leaves them; into the file that is open
            subprocess.run(["cp", f"{path}{suffix}", tmp_path / "two" / "scope"], check=True)
        assert recording.steps().step.tolist() == [1] and recording.facts().session.number == 0
        assert (tmp_path / "two" / "scope" / f"{path.name}-journal").stat().st_size, "left as it was"
        connection.execute("ROLLBACK")
    writer.close()
