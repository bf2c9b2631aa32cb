"""The audit log: lines of all its writers, and the file that is put aside when it is long."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from mt_megatron.scope.recording import audit
from mt_megatron.scope.recording.audit import Audit
from tests.scope.recording.audit_lines import read_audit


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(audit, "MOST_BYTES", 500)
    return tmp_path / "audit.jsonl"


def _numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_a_long_file_is_put_aside(path: Path) -> None:
    log = Audit(path)
    for number in range(9):
        log.write("opened", number=number)
    aside = path.with_name("audit.jsonl.1")
    numbers = [*_numbers(aside), *_numbers(path)]
    assert numbers == list(range(numbers[0], 9)) and _numbers(path) and log.lost == 0
    assert path.stat().st_mode & 0o777 == 0o600 and aside.stat().st_size <= 500


def test_a_second_process_puts_nothing_newer_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw a long file, and meanwhile the first one has put that aside and begun another."""
    path.write_bytes(b"x" * 490)
    aside = path.with_name("audit.jsonl.1")
    real, other = fcntl.flock, Audit(path)

    def first_the_other(handle: int, operation: int) -> None:
        monkeypatch.setattr("mt_megatron.scope.recording.audit.fcntl.flock", real)
        other.write("opened", number=1)
        real(handle, operation)

    monkeypatch.setattr("mt_megatron.scope.recording.audit.fcntl.flock", first_the_other)
    Audit(path).write("opened", number=2)
    assert aside.read_bytes() == b"x" * 490 and _numbers(path) == [1, 2]


def test_while_another_process_puts_it_aside_lines_are_appended(path: Path) -> None:
    path.write_bytes(b"\n" * 490)
    holder = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        log = Audit(path)
        log.write("opened", number=1)
    finally:
        os.close(holder)
    assert log.lost == 0 and not path.with_name("audit.jsonl.1").exists()
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 1


def test_page_and_lab_write_lines_of_one_kind_and_readers_see_those_put_aside(path: Path) -> None:
    """Rank 0 and the sidecar append to one file; either may find it long."""
    writers = Audit(path), Audit(path)
    for step in range(8):
        writers[step % 2].write("armed", step=step)
    writers[0].refused("wrong token", path="/open")
    rows = read_audit(path)
    assert path.with_name("audit.jsonl.1").exists()
    numbers = [row["step"] for row in rows[:-1]]
    assert len(numbers) > 3 and numbers == list(range(numbers[0], 8)) and rows[-1]["why"] == "wrong token"
    assert {frozenset(("time_unix_ns", "what", "user")) <= row.keys() for row in rows} == {True}


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "audit.jsonl").mkdir()
    log = Audit(tmp_path / "audit.jsonl", said.append)
    for step in range(3):
        log.write("armed", step=step)
    assert log.lost == 3 and len(said) == 1 and "training goes on" in said[0]
