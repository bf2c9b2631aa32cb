"""The process itself: how it starts, ends with its parent or on a signal, and what its death says."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.errors import ScopeError
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.lock import hold
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.sidecar import __main__ as program
from mt_megatron.scope.sidecar.__main__ import parsed
from mt_megatron.scope.sidecar.process import END, SidecarProcess
from tests.locks import locked_by_another
from tests.scope.sidecar.fake_ranks import FakeRank, sidecar, start_sidecar, until
from tests.scope.synthetic import RunShape, frames_of, hello, schema

SHAPE = RunShape(steps=60, interval=5, tp=1, pp=1, tensor_every=10, token_every=0)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="mtscope-") as folder:
        yield Path(folder)


def send_all(path: Path, shape: RunShape = SHAPE) -> FakeRank:
    rank = FakeRank(path, hello(shape, 0), schema(shape, 0))
    for step in range(1, shape.steps + 1):
        rank.send(*frames_of(shape, 0, step))
    return rank


def is_whole(run: Path, shape: RunShape = SHAPE) -> None:
    assert not Path(f"{scope_files(run).nodes()[0]}-wal").exists()  # readers make one
    with open_recording(run) as recording:
        assert recording.steps().step.tolist() == list(range(1, shape.steps + 1))
        assert recording.sampled()[-1] == shape.steps
        keys = recording.tensors()
        assert len(keys) == shape.layers * shape.steps // shape.tensor_every
        assert all(recording.tensor(key).missing == 0 for key in keys[-2:])


def test_it_ends_with_its_parent_and_keeps_what_was_sent(tmp_path: Path, short: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = start_sidecar(tmp_path, short / "a" / "s", parent=parent.pid)
    try:
        rank = send_all(short / "a" / "s")
        parent.kill()
        parent.wait()
        assert process.wait(30) == 0
        rank.close()
    finally:
        for each in (parent, process):
            each.kill()
            each.wait()
    assert process.stderr is not None and process.stderr.read() == b""
    process.stderr.close()
    is_whole(tmp_path)
    assert not (short / "a").exists()


def test_what_was_sent_is_written_when_its_parent_ends_it(tmp_path: Path, short: Path) -> None:
    process = start_sidecar(tmp_path, short / "a" / "s")
    try:
        rank = send_all(short / "a" / "s")
        process.send_signal(END)
        assert process.wait(30) == 0
        rank.close()
    finally:
        process.kill()
        process.wait()
    is_whole(tmp_path)


def ready(process: SidecarProcess, seconds: float) -> bool:
    """Whether the socket is there within ``seconds``."""
    until = time.monotonic() + seconds
    while not process.socket.exists():
        if process.process is None or process.process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_a_process_of_a_rank_starts_serves_and_ends(tmp_path: Path) -> None:
    said: list[str] = []
    process = SidecarProcess(tmp_path, 0, say=said.append, ranks=1)
    process.start()
    try:
        assert ready(process, 30)
        rank = send_all(process.socket)
        rank.send({"k": "bye"})
        rank.close()
    finally:
        process.close()
    is_whole(tmp_path)
    assert said == [] and not process.socket.parent.exists()


def test_a_folder_is_recorded_by_one_run_at_a_time(tmp_path: Path) -> None:
    files = scope_files(tmp_path)
    code = (
        "import sys; from mt_megatron.scope.recording.files import scope_files; "
        "from mt_megatron.scope.recording.lock import hold; "
        f"release = hold(scope_files({str(tmp_path)!r}), print); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ScopeError, match=rf"another run records to .*process {other.pid} on host"):
            hold(files, print)
    finally:
        other.kill()  # A run that is killed keeps nobody out.
        other.communicate(timeout=30)
    release = hold(files, print)
    hold(files, print)()  # This process's own: a session that was not closed does not keep the next one out.
    release()
    hold(files, print)()


def test_a_run_of_another_container_is_not_this_one(tmp_path: Path) -> None:
    """Host name and pid are those of this process, which does not hold the lock."""
    files = scope_files(tmp_path)
    files.root.mkdir()
    files.lock.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    with locked_by_another(files.lock), pytest.raises(ScopeError, match="another run records to"):
        hold(files, print)
    hold(files, print)()


def test_storage_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    said: list[str] = []
    hold(scope_files(tmp_path), said.append)()
    assert len(said) == 1 and "has no file locks (No locks available)" in said[0]


def test_a_killed_sidecar_is_one_line_and_its_folder_goes(tmp_path: Path) -> None:
    said: list[str] = []
    process = SidecarProcess(tmp_path, 0, say=said.append, ranks=1)
    process.start()
    try:
        assert ready(process, 30)
        rank = send_all(process.socket)
        assert process.process is not None
        os.kill(process.process.pid, signal.SIGKILL)
        until(lambda: said and not process.socket.parent.exists())
        assert said == ["scope: the sidecar ended with code -9: nothing more is recorded; training goes on"]
        rank.close()
    finally:
        process.close()
    assert len(said) == 1


def test_a_sidecar_that_cannot_begin_says_why_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "scope").write_text("in the way")
    said: list[str] = []
    process = SidecarProcess(tmp_path, 0, say=said.append)
    process.start()
    try:
        assert process.process is not None
        assert process.process.wait(30) == 3
        assert not ready(process, 0)
        until(lambda: not process.socket.parent.exists())
    finally:
        process.close()
    (line,) = said
    assert line.startswith("scope: nothing is recorded on this node; training goes on: ")
    assert "cannot be written" in line and "--scope-dir" in line


def test_an_interpreter_that_cannot_be_started_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    said: list[str] = []
    process = SidecarProcess(tmp_path, 0, say=said.append)
    process.start()
    assert not ready(process, 0)
    process.close()
    (line,) = said
    assert "nothing is recorded" in line and "training goes on" in line
    assert not process.socket.parent.exists()


def test_its_command_line_says_all_that_it_was_given(tmp_path: Path) -> None:
    process = SidecarProcess(
        tmp_path,
        3,
        say=print,
        ranks=8,
        retain_mib=64,
        sinks=("tensorboard", "wandb:p"),
        socket=tmp_path / "s",
    )
    options = parsed(process._command[3:])
    assert (options.run, options.socket, options.node) == (tmp_path, tmp_path / "s", 3)
    assert (options.ranks, options.retain_mib, options.parent) == (8, 64, os.getpid())
    assert options.sinks == ("tensorboard", "wandb:p") and not options.serve


@pytest.mark.parametrize(
    "wrong", [["--node", "-1"], ["--retain-mib", "0"], ["--port", "65536"], ["--ranks", "-2"]]
)
def test_numbers_that_cannot_be_are_refused(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(["--run", str(tmp_path), "--socket", "s", "--node", "0", *wrong])
    assert caught.value.code == 2 and "expected a node" in capsys.readouterr().err


def test_a_signal_to_the_whole_job_does_not_end_it_before_its_parent(tmp_path: Path) -> None:
    with sidecar(tmp_path / "run", tmp_path / "private" / "s") as process:
        process.send_signal(signal.SIGUSR1)
        process.terminate()
        process.send_signal(signal.SIGUSR1)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)

        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.terminate()  # it has taken the first two for one
        assert process.wait(20) == 0


def test_signals_to_the_job_wait_until_it_has_started(tmp_path: Path) -> None:
    """A scheduler's, sent while the interpreter starts, neither end it nor get lost; the last one ends it."""
    said: list[str] = []
    process = SidecarProcess(tmp_path, 0, say=said.append, ranks=1)
    process.start()
    try:
        assert process.process is not None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            process.process.send_signal(number)
        assert ready(process, 30)
        rank = send_all(process.socket)
        rank.send({"k": "bye"})
        rank.close()
    finally:
        process.close()
    is_whole(tmp_path)
    assert said == [] and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    early = SidecarProcess(tmp_path / "early", 0, say=said.append)
    early.start()
    early.close()
    assert early.process is not None and early.process.returncode == 0 and said == []


def test_what_ends_it_is_in_the_log_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise ValueError("an error of its own")

    monkeypatch.setattr(program, "_run", fails)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    handlers = list(logging.getLogger().handlers)
    (tmp_path / "scope").mkdir()
    given = ["--run", str(tmp_path), "--socket", str(tmp_path / "s"), "--node", "0"]
    try:
        with pytest.raises(ValueError, match="of its own"):
            program.main(given)
        logging.getLogger("mt_megatron.scope.web.app").error("/api/run failed")
    finally:
        logging.getLogger().handlers[:] = handlers
    text = scope_files(tmp_path).log(os.uname().nodename, 0).read_text()
    assert "Traceback" in text and "ValueError: an error of its own" in text and "/api/run failed" in text
