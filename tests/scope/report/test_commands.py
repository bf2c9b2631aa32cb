"""``mt-megatron scope``: what each action prints, and what it says where it cannot."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.cli.main import main
from mt_megatron.scope.recording.files import read_requests, scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.writer import Alert, Writer
from mt_megatron.scope.report.status import status_of
from mt_megatron.scope.web.access import TokenFile, read_token_file, write_token_file
from tests.scope.synthetic import RunShape, hello, step_frame, write_run

SHAPE = RunShape(steps=40, interval=5, tensor_every=20, token_every=20, tokens=32)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs ``a`` and ``b``, which parts from it at step 20; ``calm`` without alerts, ``empty``, ``none``."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a", SHAPE)
    write_run(folder / "b", replace(SHAPE, differs_from=20))
    write_run(folder / "calm", replace(SHAPE, steps=10), extras=False)
    files = scope_files(folder / "empty")
    files.root.mkdir(parents=True)
    Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26).close()
    (folder / "none").mkdir()
    yield folder


def run(*words: object) -> int:
    return main(["scope", *map(str, words)])


Captured = pytest.CaptureFixture[Any]

READING = {
    "report": ["report", "RUN"],
    "status": ["status", "RUN"],
    "compare": ["compare", "RUN", "RUN"],
    "sql": ["sql", "RUN", "select * from steps"],
    "watch": ["watch", "RUN"],
    "open": ["open", "RUN"],
}


@pytest.mark.parametrize("words", READING.values(), ids=READING)
def test_a_run_without_a_recording_is_wrong_use(words: list[str], runs: Path, capsys: Captured) -> None:
    for name in ("none", "nowhere"):
        assert run(*(str(runs / name) if word == "RUN" else word for word in words)) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1
        for said in ("found no recording in", "expected node-HOST-NNNNN.sqlite", "Give the folder"):
            assert said in err
    assert not (runs / "none" / "scope").exists()


@pytest.mark.parametrize("word", ["report", "status", "compare"])
def test_a_recording_that_no_rank_has_reached_is_said(word: str, runs: Path, capsys: Captured) -> None:
    assert run(*(str(runs / "empty") if each == "RUN" else each for each in READING[word])) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    expected = (
        "no step in common (no steps and no steps); expected recordings of the same steps"
        if word == "compare"
        else "found no rank in the recording in"
    )
    assert expected in err


@pytest.mark.parametrize("words", [*READING.values()][:4], ids=[*READING][:4])
def test_a_damaged_recording_is_one_line(words: list[str], tmp_path: Path, capsys: Captured) -> None:
    files = scope_files(tmp_path)
    files.root.mkdir()
    files.node("a", 0).write_bytes(b"no database at all" * 300)
    assert run(*(str(tmp_path) if word == "RUN" else word for word in words)) == 2
    _, err = capsys.readouterr()
    assert "cannot be read as a recording" in err and "copy it again" in err
    assert "Traceback" not in err and len(err.splitlines()) == 1


def test_report_writes_a_page_and_prints_where(runs: Path, capsys: Captured) -> None:
    assert run("report", runs / "a") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("steps 1-40") and "alert at step" in lines[1]
    assert Path(lines[-1]) == runs / "a" / "scope" / "report.html" and Path(lines[-1]).is_file()
    assert run("report", runs / "calm" / "scope", "-o", runs / "out" / "page.html", "--last-step", 4) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("steps 1-4") and lines[1] == "  no alerts"
    assert (runs / "out" / "page.html").is_file()


def test_report_where_it_cannot_be_written(runs: Path, capsys: Captured) -> None:
    (runs / "file").write_text("")
    assert run("report", runs / "a", "-o", runs / "file" / "page.html") == 2
    err = capsys.readouterr().err
    assert "expected a place that can be read and written" in err and "Traceback" not in err
    assert run("report", runs / "a", "--first-step", 9, "--last-step", 3) == 2
    assert "--first-step 9 is after --last-step 3" in capsys.readouterr().err


def test_a_page_of_another_machine_can_be_left_for_this_one(tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "scope" / "page.json"
    page.parent.mkdir()
    write_token_file(page, TokenFile(host="elsewhere", port=8700, pid=1, view="v" * 43, control="c" * 43))
    assert run("open", tmp_path) == 0
    out = capsys.readouterr().out
    assert "served on elsewhere" in out and "open RUN --here" in out
    # There is no recording to serve.
    assert run("open", tmp_path, "--here") == 2
    assert "found no recording in" in capsys.readouterr().err


def test_a_page_of_another_machine_stays_while_the_recording_is_served_here(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, replace(SHAPE, steps=4, tensor_every=0, token_every=0), extras=False)
    page = tmp_path / "scope" / "page.json"
    write_token_file(page, TokenFile(host="elsewhere", port=8700, pid=1, view="v" * 43, control="c" * 43))
    before = page.read_bytes()
    during: list[bytes] = []

    async def ended(self: object) -> None:
        during.append(page.read_bytes())
        raise asyncio.CancelledError

    monkeypatch.setattr("mt_megatron.scope.web.server.Page.run", ended)
    assert run("open", tmp_path, "--here", "--control") == 0
    assert during == [before] and page.read_bytes() == before
    line, control = capsys.readouterr().out.splitlines()
    assert "http://127.0.0.1:" in line and ":8700/" not in line and "another link" not in line
    assert control.startswith("control token: ") and "c" * 43 not in control


def test_a_recording_copied_without_its_modes_can_be_served_here(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, replace(SHAPE, steps=4, tensor_every=0, token_every=0), extras=False)
    page = tmp_path / "scope" / "page.json"
    write_token_file(page, TokenFile(host="elsewhere", port=8700, pid=1, view="v" * 43, control="c" * 43))
    page.chmod(0o644)
    before = page.read_bytes()

    async def ended(self: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("mt_megatron.scope.web.server.Page.run", ended)
    assert run("open", tmp_path) == 2
    assert "found mode 0644" in (said := capsys.readouterr().err) and "--here" in said
    assert run("open", tmp_path, "--here") == 0
    assert "http://127.0.0.1:" in capsys.readouterr().out and page.read_bytes() == before


def served_once(monkeypatch: pytest.MonkeyPatch, page: Path) -> list[TokenFile]:
    """What ``page.json`` says while a page is served, each time; the page ends at once."""
    during: list[TokenFile] = []

    async def ended(self: object) -> None:
        during.append(read_token_file(page))
        raise asyncio.CancelledError

    monkeypatch.setattr("mt_megatron.scope.web.server.Page.run", ended)
    return during


def test_a_dead_page_whose_port_another_process_has_is_replaced(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, replace(SHAPE, steps=4, tensor_every=0, token_every=0), extras=False)
    page = tmp_path / "scope" / "page.json"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    during = served_once(monkeypatch, page)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        here = TokenFile(host=socket.gethostname(), port=port, pid=ended.pid, view="v" * 43, control="c" * 43)
        write_token_file(page, here)
        assert run("open", tmp_path) == 0
        assert len(during) == 1 and during[0].port != port and during[0].pid == os.getpid()
        # A process that runs, but listens elsewhere.
        write_token_file(page, replace(here, pid=os.getppid()))
        assert run("open", tmp_path) == 0 and len(during) == 2
        assert f":{port}/" not in capsys.readouterr().out
        # One that listens there and does not prove that it has the token gets no link; --here serves another
        # page, and leaves that one's file.
        write_token_file(page, replace(here, pid=os.getpid()))
        assert run("open", tmp_path) == 2 and len(during) == 2
        out, said = capsys.readouterr()
        assert f"127.0.0.1:{port} that does not prove" in said and "ticket" not in out + said
        # The page of another machine, and a server of this one where its tunnel would end.
        write_token_file(page, replace(here, host="elsewhere"))
        assert run("open", tmp_path) == 2 and len(during) == 2
        out, said = capsys.readouterr()
        assert "does not prove to be the page of elsewhere" in said and "ticket" not in out + said
        write_token_file(page, replace(here, pid=os.getpid()))
        assert run("open", tmp_path, "--here") == 0
        assert during[2] == read_token_file(page) == replace(here, pid=os.getpid())
        assert f":{port}/" not in capsys.readouterr().out


def test_status_of_a_run(runs: Path, capsys: Captured) -> None:
    assert run("status", runs / "a") == 1  # it has alerts
    text = capsys.readouterr().out
    for said in ("step 40, loss", "4 of 4 ranks recorded on 1 node", "all ranks have ended", "asked for:"):
        assert said in text
    assert "12 frames" in text and text.count("alert at step") == 2
    assert run("status", runs / "calm") == 0
    assert "no alerts" in capsys.readouterr().out
    assert run("status", runs / "a", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["world_size"], found["ended"], len(found["alerts"])) == (40, 4, 4, 2)
    assert found["last_sample"] == 40 and found["dropped"][0]["frames"] == 12


def test_status_counts_alerts_and_drops_of_the_whole_start(tmp_path: Path) -> None:
    """A rewind or a pair begins a session, and the start goes on; what was undone counts no more."""
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    shape = RunShape(tp=1, pp=1)
    name = hello(shape, 0)["session"]

    def alert(step: int, attempt: int) -> None:
        told = {"value": 9.0, "low": 1.0, "high": 2.0, "text": f"alert of step {step}"}
        writer.alert(Alert(step=step, kind="band", path="", statistic="loss", **told), (name, attempt))

    steps = [(0, hello(shape, 0)), *((0, {**step_frame(shape, 0, each), "attempt": 0}) for each in (1, 2, 3))]
    writer.tick([*steps, (0, {"k": "dropped", "frames": 5, "bytes": 10})])
    alert(1, 0)
    alert(3, 0)
    writer.tick([(0, {**step_frame(shape, 0, 2), "attempt": 1})])
    writer.close()
    with open_recording(tmp_path) as recording:
        found = status_of(recording)
    assert [each.text for each in found.alerts] == ["alert of step 1"]
    assert [each.frames for each in found.dropped] == [5]


def test_status_of_a_run_that_stands_still(tmp_path: Path, capsys: Captured) -> None:
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    shape = RunShape(tp=2, pp=1)
    writer.tick([(0, hello(shape, 0)), (0, {**step_frame(shape, 0, 1), "t": 1_000_000_000})])
    writer.close()
    assert run("status", tmp_path) == 0
    text = capsys.readouterr().out
    assert "the run was killed, pauses or hangs" in text and "1 of 2 ranks recorded" in text
    assert "values may lack the parts of the ranks that are not recorded" in text
    assert run("status", tmp_path, "--every", "-1") == 2
    assert "expected seconds above 0" in capsys.readouterr().err


def test_compare_tells_by_its_exit_code(runs: Path, capsys: Captured) -> None:
    assert run("compare", runs / "a", runs / "a") == 0
    assert capsys.readouterr().out.startswith("equal: 40 common steps")
    assert run("compare", runs / "a", runs / "b") == 1
    assert "first module: decoder.layers.2.mlp at step 20" in capsys.readouterr().out
    assert run("compare", runs / "a", runs / "b", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first_loss"]["step"] == 20 and found["equal"] is False
    assert run("compare", runs / "a", runs / "b", "--tolerance", 0.05) == 0
    assert run("compare", runs / "a", runs / "b", "--tolerance", 1) == 2
    assert "expected 0 or more and below 1" in capsys.readouterr().err


def test_sql_prints_tables_csv_and_json(
    runs: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = "select step, skipped from steps where step < 3 order by step"
    assert run("sql", runs / "a", statement) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][0][:1] == ["step"]
    assert run("sql", runs / "a", statement, "--format", "csv") == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows == [["step", "skipped"], ["1", "0"], ["2", "0"]]
    monkeypatch.setattr("sys.stdin", io.StringIO(statement))
    assert run("sql", runs / "a", "-", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {"step": 1, "skipped": 0},
        {"step": 2, "skipped": 0},
    ]


def test_sql_that_would_write_is_refused(runs: Path, capsys: Captured) -> None:
    for statement in ("delete from steps", f"attach '{runs / 'x.db'}' as x", "select * from nowhere"):
        assert run("sql", runs / "a", statement) == 2
        err = capsys.readouterr().err
        assert "the statement cannot be run" in err and "Views: sessions" in err and "Traceback" not in err
    assert not (runs / "x.db").exists()


def test_watch_changes_what_ranks_are_asked_for(runs: Path, capsys: Captured) -> None:
    folder, files = runs / "calm", scope_files(runs / "calm")
    assert run("watch", folder) == 0
    assert "nothing is asked for" in capsys.readouterr().out
    first, second = "mlp@decoder.layers.1", "router@decoder.layers.*:every=3"
    assert run("watch", folder, first) == 0 and read_requests(files) == [first]
    assert run("watch", folder, second, "--add") == 0 and read_requests(files) == [first, second]
    said = capsys.readouterr().out
    assert "so far found no module 'decoder.layers.1'" not in said
    assert run("watch", folder, first, "mlp@decoder.layer.1") == 0
    assert "so far found no module 'decoder.layer.1'" in capsys.readouterr().out
    assert run("watch", folder, first, second) == 0
    capsys.readouterr()
    assert run("watch", folder) == 0
    assert capsys.readouterr().out.split() == [first, second]
    assert run("watch", folder, second) == 0 and read_requests(files) == [second]
    assert run("watch", folder, "--clear") == 0 and read_requests(files) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["everything@decoder"], "everything"),
        (["mlp@decoder:heads"], "heads"),
        (["--clear", "--add"], "expected no REQUEST and no --add"),
        ([f"mlp@decoder.layers.{index}" for index in range(65)], "expected 64 at most"),
    ],
)
def test_requests_that_cannot_be_are_refused_and_change_nothing(
    words: list[str], said: str, runs: Path, capsys: Captured
) -> None:
    before = read_requests(scope_files(runs / "a"))
    assert run("watch", runs / "a", *words) == 2
    assert said in capsys.readouterr().err and read_requests(scope_files(runs / "a")) == before


def test_a_requests_file_that_is_damaged_is_said(tmp_path: Path, capsys: Captured) -> None:
    write_run(tmp_path, replace(SHAPE, steps=5), extras=False)
    scope_files(tmp_path).requests.write_text("{")
    for words in (["watch", tmp_path], ["watch", tmp_path, "mlp@decoder", "--add"], ["status", tmp_path]):
        assert run(*words) == 2
        err = capsys.readouterr().err
        assert "requests.json" in err and "write it again or delete it" in err
    assert run("watch", tmp_path, "mlp@decoder") == 0  # as the message says


def test_open_checks_before_it_listens(runs: Path, capsys: Captured) -> None:
    assert run("open", runs / "a", "--port", 65536) == 2
    assert "expected 0 (a free one) to 65535" in capsys.readouterr().err


def test_control_of_what_does_not_train(runs: Path, capsys: Captured) -> None:
    for words in (["pause"], ["step", "2"], ["status"]):
        assert run("control", runs / "none", *words) == 2
        err = capsys.readouterr().err
        assert "expected the folder of a run that trains" in err and "Give the folder" in err
