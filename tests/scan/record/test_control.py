"""The control file: written by the command line, obeyed by a run that trains, refused when it is wrong."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.cli.main import main
from mt_megatron.errors import ScanError
from mt_megatron.scan.format.run_files import run_files, write_run
from mt_megatron.scan.record.control import ControlWatch, change_control, read_control
from mt_megatron.scan.record.recorder import Recorder
from tests.scan.recordings import record, rows, step


def test_the_command_line_changes_what_a_training_run_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def until_at(recorder: Recorder, level: str, iteration: int) -> int:
        deadline = time.monotonic() + 60
        while recorder.level != level and time.monotonic() < deadline:
            iteration += 1
            step(iteration)
            time.sleep(0.02)
        assert recorder.level == level
        return iteration

    def act(recorder: Recorder) -> None:
        step(1)
        assert main(["scan", "level", str(tmp_path), "full"]) == 0
        iteration = until_at(recorder, "full", 1)
        assert main(["scan", "level", str(tmp_path / "scan"), "off"]) == 0
        iteration = until_at(recorder, "off", iteration)
        assert main(["scan", "window", str(tmp_path), "1000:1000:full"]) == 0
        until_at(recorder, "full", iteration)
        assert main(["scan", "window", str(tmp_path), "none"]) == 0
        until_at(recorder, "off", iteration)

    trace = record(tmp_path, act)
    assert [note["level"] for note in trace.notes if note["what"] == "level"] == [
        *("base", "full", "off", "full", "off")
    ]
    assert "layer" in {row[0] for row in rows(trace)}
    assert "1 rank(s) take it up at their next step" in capsys.readouterr().out


def test_what_lay_there_before_the_start_is_not_obeyed(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    write_run(files, {})
    change_control(files, {"level": "full"})
    asked: list[Any] = []
    watch = ControlWatch(files.control, asked.append)
    watch.look()
    assert asked == []
    change_control(files, {"level": "base"})
    watch.look()
    watch.look()
    assert asked == [{"level": "base"}]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"level": "loud"}', '{"window": {"every": 0}}', '{"level": "full", "window": 3}'],
)
def test_a_wrong_file_is_said_and_not_obeyed(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, rank=0)
    recorder.files.root.mkdir()
    recorder.files.control.write_text(text)
    with caplog.at_level(logging.WARNING):
        recorder._control.look()
        recorder._control.look()
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("the control file is not obeyed: ")
    assert (recorder._listening._wanted, recorder._listening._window) == ("base", None)
    # And one that is right afterwards is.
    change_control(recorder.files, {"level": "full"}) if text not in ("{", "[]") else None
    recorder.files.control.write_text('{"level": "kernel"}')
    recorder._control.look()
    assert recorder._listening._wanted == "kernel"


def test_changes_add_up_and_none_removes(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    write_run(files, {})
    change_control(files, {"level": "full", "inject": [1]})
    assert change_control(files, {"window": False, "inject": None}) == {"level": "full", "window": False}
    assert json.loads(files.control.read_text()) == {"level": "full", "window": False}
    for name in os.listdir(files.root):
        assert stat.S_IMODE((files.root / name).stat().st_mode) == 0o600, name


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    write_run(files, {})

    def many(name: str) -> None:
        for number in range(50):
            change_control(files, {f"{name}{number}": number + 1})

    threads = [threading.Thread(target=many, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_control(files.control)) == 150


def test_the_command_line_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["level", str(tmp_path), "full"], ["report", str(tmp_path)], ["status", str(tmp_path)]):
        assert main(["scan", *words]) == 2
        assert "NoTraceError: found no trace in" in capsys.readouterr().err
    write_run(run_files(tmp_path), {})
    assert main(["scan", "window", str(tmp_path), "3:5"]) == 2
    assert "found a window of 5 steps every 3 steps" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["scan", "level", str(tmp_path), "loud"])
    assert ended.value.code == 2
    assert not run_files(tmp_path).control.exists()
    assert main(["scan", "level", str(tmp_path), "full"]) == 0
    assert "no rank records there" in capsys.readouterr().out
    run_files(tmp_path).control.write_text("{")
    with pytest.raises(ScanError, match="cannot be read"):
        change_control(run_files(tmp_path), {"level": "full"})
