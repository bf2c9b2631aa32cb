"""The audit log of the page: its lines, and the file that is put aside when it is long."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from mt_megatron.scope.web import audit
from mt_megatron.scope.web.audit import Audit


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(audit, "MOST_BYTES", 400)
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
    assert path.stat().st_mode & 0o777 == 0o600 and aside.stat().st_size <= 400


def test_a_second_process_puts_nothing_newer_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw a long file, and meanwhile the first one has put that aside and begun another."""
    path.write_bytes(b"x" * 390)
    aside = path.with_name("audit.jsonl.1")
    real, other = fcntl.flock, Audit(path)

    def first_the_other(handle: int, operation: int) -> None:
        monkeypatch.setattr("mt_megatron.scope.web.audit.fcntl.flock", real)
        other.write("opened", number=1)
        real(handle, operation)

    monkeypatch.setattr("mt_megatron.scope.web.audit.fcntl.flock", first_the_other)
    Audit(path).write("opened", number=2)
    assert aside.read_bytes() == b"x" * 390 and _numbers(path) == [1, 2]


def test_while_another_process_puts_it_aside_lines_are_appended(path: Path) -> None:
    path.write_bytes(b"\n" * 390)
    holder = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        log = Audit(path)
        log.write("opened", number=1)
    finally:
        os.close(holder)
    assert log.lost == 0 and not path.with_name("audit.jsonl.1").exists()
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 1
