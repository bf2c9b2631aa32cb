"""The columnar store answers in SQL what the records say, offline, and sees nothing but the trace."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.cli.main import main
from mt_megatron.errors import ConfigError
from mt_megatron.scan.analysis.trace import open_trace
from mt_megatron.scan.export.sql import _words, ensure_store, load, query
from mt_megatron.scan.format import segments
from mt_megatron.scan.format.run_files import run_files, segment_path
from mt_megatron.scan.format.segments import read_blocks
from tests.scan import handmade
from tests.scan.handmade import HandmadeRun, write_handmade

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_handmade(folder, HandmadeRun(steps=5, slow_rank=1, factor=1.5))
    finding = {
        "cause": "slow_compute", "lateness": "late_arrival", "ranks": [1], "first_step": 1, "last_step": 5,
        "lost_fraction": 0.2, "confidence": 0.9, "evidence": ["longer"], "time_unix": 1.0, "named_at_step": 5,
    }  # fmt: skip
    (folder / "scan" / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    return folder


def test_sums_are_those_of_the_records(run: Path) -> None:
    answer = query(
        run, "select rank, sum(end_ns - begin_ns) from spans where kind = 'forward' group by 1 order by 1"
    )
    usual = 5 * 2 * handmade.FORWARD
    assert answer.rows == [(0, usual), (1, round(1.5 * usual)), (2, usual), (3, usual)]


def test_the_slow_rank_is_one_question_away(run: Path) -> None:
    answer = query(
        run,
        "select rank, host from steps join ranks using (rank) group by all "
        "order by median(compute_seconds) desc limit 1",
    )
    assert answer.rows == [(1, "node-1")]


def test_unknown_is_null_and_no_number(run: Path) -> None:
    answer = query(
        run,
        "select count(*), count(device_begin_ns), count(bytes), count(seq), count(peer), count(work) "
        "from spans where kind = 'forward'",
    )
    assert answer.rows == [(40, 0, 0, 0, 0, 0)]
    answer = query(run, "select count(*), count(isnan(checkpoint_seconds) or null) from steps")
    assert answer.rows == [(20, 0)]


def test_groups_counters_and_findings_have_names(run: Path) -> None:
    assert query(run, "select distinct process_group from spans where kind = 'collective'").rows == [("dp",)]
    names = query(run, "select distinct name from counters order by 1").rows
    assert names == [("beat_delay_ns",), ("process_cpu_ns",)]
    assert query(run, "select cause, ranks[1] from findings").rows == [("slow_compute", 1)]


def test_a_number_beyond_the_table_has_no_name() -> None:
    arrow = load("pyarrow")
    assert _words(arrow, np.array([1, 7, 0], dtype=np.uint16), ["", "a"]).to_pylist() == ["a", "", ""]


def test_the_store_is_made_again_only_when_the_trace_has_grown(run: Path, tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=2))
    made = (ensure_store(open_trace(tmp_path)) / "ranks.parquet").stat().st_mtime_ns
    assert (ensure_store(open_trace(tmp_path)) / "ranks.parquet").stat().st_mtime_ns == made
    (tmp_path / "scan" / "findings.jsonl").write_text('{"cause": "hang"}\n')
    assert (ensure_store(open_trace(tmp_path)) / "ranks.parquet").stat().st_mtime_ns != made
    assert not [path for path in (tmp_path / "scan").iterdir() if path.name.startswith(".store")]


def test_a_file_that_cannot_be_read_is_named_and_its_gap_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=2))
    path = segment_path(run_files(tmp_path).rank_folder(1), 0)
    whole = path.read_bytes()
    zeros = bytes(len(whole))
    ask = ["scan", "sql", str(tmp_path), "select count(distinct rank) as ranks from spans", "--format", "csv"]
    path.write_bytes(zeros)
    assert main(ask) == 1
    printed = capsys.readouterr()
    assert printed.out == "ranks\n3\n"
    assert printed.err.startswith(f"mt-megatron scan: not in the result: {path} is no segment of a trace")
    path.write_bytes(whole)
    assert main(ask) == 0
    assert capsys.readouterr() == ("ranks\n4\n", ""), "made anew, though the file has the size of before"
    path.write_bytes(zeros)
    assert main(ask) == 0
    assert capsys.readouterr() == ("ranks\n4\n", ""), "the tables were made when all files could be read"


def test_a_file_that_breaks_off_is_named_and_its_gap_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first note can be read, so that it is not known before its records are asked for."""
    write_handmade(tmp_path, HandmadeRun(steps=2))
    path = segment_path(run_files(tmp_path).rank_folder(1), 0)
    count = "select count(*) from spans where rank = 1"

    def breaking_off(read: Path, offset: int = 0) -> Iterator[tuple[int, Any, int]]:
        for number, block in enumerate(read_blocks(read, offset)):
            if read == path and number == 4:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(read))
            yield block

    with monkeypatch.context() as patched:
        patched.setattr(segments, "read_blocks", breaking_off)
        part = query(tmp_path, count)
    (sentence,) = part.unreadable
    assert f"{path} cannot be read" in sentence
    whole = query(tmp_path, count)
    assert whole.unreadable == () and whole.rows[0][0] > part.rows[0][0] > 0


@pytest.mark.parametrize(
    "statement",
    [
        "select * from read_csv('{secret}')",
        "select * from read_text('{secret}')",
        "copy (select 1) to '{out}'",
        "attach '{out}' as other",
        "install httpfs",
        "set enable_external_access=true",
    ],
)
def test_a_statement_reaches_no_other_file(run: Path, tmp_path: Path, statement: str) -> None:
    secret, out = tmp_path / "secret.csv", tmp_path / "out"
    secret.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="cannot be run"):
        query(run, statement.format(secret=secret, out=out))
    assert not out.exists()


def test_a_wrong_statement_names_the_tables(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)span.*Tables: spans, counters, ranks, steps, findings"):
        query(run, "select * from span")


def test_a_missing_library_says_how_to_get_it(run: Path) -> None:
    program = (
        "import sys; sys.modules['duckdb'] = None\n"
        "from mt_megatron.cli.main import main\n"
        f"sys.exit(main(['scan', 'sql', {str(run)!r}, 'select 1']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "pip install 'mt_megatron[scan]'" in done.stderr


def test_the_command_prints_tables_csv_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statement = "select rank, host from ranks order by rank limit 2"
    printed = []
    for format in ("table", "csv", "json"):
        assert main(["scan", "sql", str(run), statement, "--format", format]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].splitlines() == ["rank  host", "----  ------", "   0  node-0", "   1  node-1"]
    assert printed[1] == "rank,host\n0,node-0\n1,node-1\n"
    assert json.loads(printed[2]) == [{"rank": 0, "host": "node-0"}, {"rank": 1, "host": "node-1"}]
