"""``mt-megatron scan``: what is wrong with a place or a number is said in a line, and before any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mt_megatron.cli.main import main
from mt_megatron.cli.scan import inject as scan_inject
from mt_megatron.cli.scan.sql import show
from mt_megatron.cli.scan.trace import parse_ranks
from mt_megatron.errors import ConfigError
from mt_megatron.scan.format.run_files import run_files, write_run
from mt_megatron.scan.respond.agent import drill_log_path
from tests.launch import ROOT


def test_a_place_that_cannot_be_written_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = tmp_path / "run", tmp_path / "file"
    file.write_text("")
    simulate = ["--layout", "dp=2", "--steps", "6", "--microbatches", "1"]
    assert main(["scan", "simulate", str(file / "run"), *simulate]) == 1
    assert main(["scan", "simulate", str(run), *simulate]) == 0
    assert main(["scan", "report", str(run), "--output", str(file / "report")]) == 1
    assert main(["scan", "trace", str(run), "--output", str(file / "trace.json.gz")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(f"{file}" in line and "expected a place" in line for line in lines)


def test_simulate_in_an_installed_wheel_asks_for_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mt_megatron.cli.scan.simulate._CHECKOUT", tmp_path)
    assert main(["scan", "simulate", str(tmp_path / "run")]) == 2
    assert "needs a checkout" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_simulate_finds_the_checkout_from_any_folder(tmp_path: Path) -> None:
    """As the script of an editable install: the package is found, the checkout is not on the path."""
    (tmp_path / "mt_megatron").symlink_to(ROOT / "mt_megatron")
    command = [sys.executable, "-m", "mt_megatron.cli", "scan", "simulate", "run"]
    command += ["--layout", "dp=2", "--steps", "2", "--microbatches", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "simulated 2 steps of 2 ranks" in done.stdout, done.stderr
    assert (tmp_path / "run" / "scan" / "run.json").is_file()


def test_an_error_that_is_of_no_place_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*given: object) -> int:
        raise ConnectionResetError(104, "Connection reset by peer")

    def full(*given: object) -> int:
        raise OSError(28, "No space left on device")

    write_run(run_files(tmp_path), {"world_size": 1})
    monkeypatch.setattr("mt_megatron.scan.record.control.change_control", lost)
    with pytest.raises(ConnectionResetError):
        main(["scan", "level", str(tmp_path), "full"])
    monkeypatch.setattr("mt_megatron.scan.record.control.change_control", full)
    assert main(["scan", "level", str(tmp_path), "full"]) == 1
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["selftest", "--json", "RUN/none/figures.json"],
        ["selftest", "--folder", "RUN/none"],
        ["simulate", "RUN/made", "--truth", "RUN/none/truth.json"],
        ["confirm", "RUN", "--ranks", "0", "--timeout", "nan"],
        ["inject", "RUN", "jitter:rank=0", "--seconds", "nan"],
        ["status", "RUN", "--every", "nan"],
    ],
)
def test_nothing_is_begun_with_a_wrong_option(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(run_files(tmp_path), {"world_size": 4})
    before = sorted(tmp_path.rglob("*"))
    assert main(["scan", *(word.replace("RUN", str(tmp_path)) for word in words)]) == 2
    assert "expected" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_line_of_a_drills_log_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = drill_log_path(run_files(tmp_path))
    log.parent.mkdir()
    begun = {"rank": 1, "on": ["jitter:rank=1,ms=5"]}
    log.write_text('{"rank": 0, "o\n[]\n' + json.dumps(begun) + "\n" + '{"rank"')
    on: dict[int, bool] = {}
    seen = scan_inject._tell(log, 0, on)
    assert on == {1: True} and capsys.readouterr().out == "rank 1: jitter:rank=1,ms=5\n"
    with log.open("r+") as file:
        file.seek(seen)
        file.write('{"rank": 1, "on": []}\n')
    scan_inject._tell(log, seen, on)
    assert on == {1: False} and capsys.readouterr().out == "rank 1: as before\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8", [0, 1, 2, 3, 8]), (" 7 ", [7]), ("2-2", [2]), ("10-99999999999", [10, 11])],
)
def test_ranks_are_a_list_however_far_it_goes(text: str, expected: list[int]) -> None:
    spans = parse_ranks(text)
    assert [rank for rank in range(12) if any(rank in span for span in spans)] == expected


@pytest.mark.parametrize("text", ["", "a", "-1", "1-", "3-1,8", "1,,2", "\u00b2"])
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Expected a list such as"):
        parse_ranks(text)


def test_an_answer_in_json_is_json_whatever_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    show(("a", "b"), [(float("nan"), [1.5, float("inf")]), (2, {"c": float("-inf")})], "json")

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    printed = json.loads(capsys.readouterr().out, parse_constant=refused)
    assert printed == [{"a": None, "b": [1.5, None]}, {"a": 2, "b": {"c": None}}]
