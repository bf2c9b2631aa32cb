"""The report names the culprit first, says what limits it, and its page needs nothing but itself."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest

from mt_megatron.cli.main import main
from mt_megatron.errors import ScanError
from mt_megatron.scan.analysis.trace import Place, open_trace
from mt_megatron.scan.export.output_file import rank_title
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.findings.text import headline, rank_list, sentence
from mt_megatron.scan.format.run_files import read_run, run_files, segment_path, write_run
from mt_megatron.scan.format.segments import SegmentWriter
from mt_megatron.scan.monitor.status import run_status
from mt_megatron.scan.report.data import CATEGORIES, ReportData, StepTimes
from mt_megatron.scan.report.gather import ReportFiles, write_report
from mt_megatron.scan.report.html import page
from mt_megatron.scan.report.markdown import markdown
from tests.scan.handmade import HandmadeRun, write_handmade
from tests.scan.recordings import record, step

_VOID = {"meta", "rect", "path", "circle", "polyline", "br"}


class _Page(HTMLParser):
    """Whether elements close in order, and every address a page could ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.addresses, self.headings = list[str](), list[str](), list[str]()
        self.text = ""
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")
        ]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)
        if "style" not in self.open and "script" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    folder = tmp_path_factory.mktemp("report") / "slow-run"
    folder.mkdir()
    write_handmade(folder, HandmadeRun(steps=30, slow_rank=1, slow_from=12, factor=1.5))
    return write_report(folder)


def test_the_culprit_comes_first_on_page_and_in_markdown(slow: ReportFiles) -> None:
    (finding,) = slow.data.findings
    assert (finding.cause, finding.ranks, finding.first_step) == ("slow_compute", (1,), 12)
    html = _Page(slow.html.read_text())
    assert html.headings == [
        "slow-run",
        "Rank 1 (node-1) computes slowly",
        "Step time",
        "Ranks",
        "Timeline",
        "Where the time goes",
        "Clocks",
    ]
    order = ["Costs", "Evidence", "What to do next", "Step time", "Ranks", "Timeline"]
    assert sorted(order, key=html.text.index) == order
    text = slow.markdown.read_text()
    assert text.split("\n## ")[1].startswith("Rank 1 (node-1) computes slowly")
    assert "| stage 0, tp 0 | 0 | **1 C** |" in text


def test_the_page_asks_for_nothing(slow: ReportFiles) -> None:
    text = slow.html.read_text()
    assert _Page(text).addresses == []
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|fetch\(|XMLHttp|WebSocket", text)
    assert "default-src 'none'" in text


def test_files_are_private(slow: ReportFiles) -> None:
    assert all(path.stat().st_mode & 0o077 == 0 for path in (slow.html, slow.markdown, slow.json))
    assert slow.html.parent.stat().st_mode & 0o077 == 0


def test_json_has_what_programs_need(slow: ReportFiles) -> None:
    share = {"type": "array", "items": {"type": "number"}, "minItems": len(CATEGORIES)}
    schema = {
        "required": ["run", "simulated", "layout", "places", "findings", "step_times", "breakdown", "clocks"],
        "properties": {
            "findings": {
                "items": {"required": ["cause", "ranks", "confidence", "evidence", "lost_fraction"]}
            },
            "breakdown": {"properties": {"overall": share, "categories": {"const": list(CATEGORIES)}}},
            "verdicts": {"const": {"1": "slow_compute"}},
            "simulated": {"const": False},
        },
    }
    jsonschema.validate(json.loads(slow.json.read_text()), schema)


def test_the_timeline_shows_the_step_before_and_one_with_it(slow: ReportFiles) -> None:
    before, during = slow.data.excerpts
    assert before.step < 12 <= during.step and during.length > before.length
    rows = {row.rank: row for row in during.rows}
    assert [rank for rank, row in rows.items() if row.culprit] == [1]
    waited = {
        rank: sum(bar.end - bar.begin for bar in row.bars if bar.kind == "wait" and "dp" in bar.text)
        for rank, row in rows.items()
    }
    assert waited[0] > 0 == waited[1]


def test_a_clean_run_names_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=30))
    assert main(["scan", "report", str(tmp_path)]) == 0
    assert "No culprit found" in capsys.readouterr().out
    assert "No culprit found" in (tmp_path / "scan" / "report" / "report.html").read_text()


def test_the_command_says_it_in_a_few_lines(
    slow: ReportFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = slow.html.parents[2]
    assert main(["scan", "report", str(run), "--output", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert "\nRank 1 (node-1) computes slowly\n  costs " in out and "next: " in out
    assert (tmp_path / "out" / "report.html").exists()
    assert main(["scan", "report", str(run), "--json", "--last-step", "10"]) == 0
    assert json.loads(capsys.readouterr().out)["last_step"] == 10
    assert main(["scan", "report", str(run), "--first-step", "9", "--last-step", "3"]) == 2


def test_simulated_is_said_wherever_the_run_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_handmade(run, HandmadeRun(steps=8), simulated=True)
    files = write_report(run)
    assert files.data.simulated and run_status(run).simulated
    assert rank_title(open_trace(run), 1) == "rank 1 (dp 1 pp 0 tp 0) node-1 simulated"
    for path in (files.html, files.markdown):
        assert "simulated" in path.read_text().split("No culprit")[0]
    real = page(replace(files.data, simulated=False))
    assert "simulated" not in _Page(real).text


def test_a_hang_shows_who_is_missing_where_and_where_he_stands(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=8, hangs=2))
    (found,) = write_report(tmp_path).data.findings
    assert (found.cause, found.ranks, found.group) == ("hang", (2,), "dp")
    files = write_report(tmp_path)
    html = _Page(files.html.read_text())
    assert html.headings[1] == (
        "Rank 2 (node-0) keeps the others waiting: all_reduce number 8 of the dp group does not end"
    )
    assert html.headings[2] == "Where the ranks stand" and "train.py:7 in stuck" in html.text
    excerpt = files.data.excerpts[-1]
    assert excerpt.title.startswith("Step 9, which does not end (the first ") and excerpt.length < 10**9
    rows = {row.rank: [bar.kind for bar in row.bars] for row in excerpt.rows}
    assert "wait" in rows[3] and "collective" not in rows[3]
    assert files.data.breakdown.steps[-1] == 8


def test_a_rank_without_a_trace_is_shown_as_such(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=8))
    shutil.rmtree(run_files(tmp_path).rank_folder(3))
    files = write_report(tmp_path)
    assert files.data.missing == {3}
    text = files.html.read_text()
    assert "left no trace" in text and "3 of 4 ranks" in text and "What limits this report" in text


def test_a_torn_file_is_said(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=8))
    path = segment_path(run_files(tmp_path).rank_folder(2), 0)
    path.write_bytes(path.read_bytes()[:-20])
    assert any(
        "rank-00002" in note and "no whole block" in note for note in write_report(tmp_path).data.notes
    )


def test_the_newest_start_with_steps_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run that is started again only evaluates: that start has no step."""

    for numbers in ((1, 2, 3), (4, 5, 6, 7), ()):
        record(tmp_path, lambda recorder, numbers=numbers: [step(each) for each in numbers])
    commands = (["report"], ["trace"], ["sql", "select min(step), max(step) from steps"])
    for name, *more in commands:
        for start, shown in (([], "4 7"), (["--start", "1"], "1 3"), (["--start", "2"], "4 7")):
            assert main(["scan", name, str(tmp_path), *more, *start]) == 0
            said = capsys.readouterr().out
            if name == "sql":
                assert said.split()[-2:] == shown.split(), (start, said)
            elif name == "report":
                assert f"steps {shown.replace(' ', '-')}" in said, (start, said)
            else:
                text = gzip.decompress((tmp_path / "scan" / "trace.json.gz").read_bytes()).decode()
                assert ('"step":7' in text) == (shown == "4 7") and ('"step":2' in text) == (shown == "1 3")
        assert main(["scan", name, str(tmp_path), *more, "--start", "4"]) == 1
        assert "found no start 4" in capsys.readouterr().err
    assert "start 2 recorded; later starts recorded no whole step" in " ".join(open_trace(tmp_path).notes)


def test_no_trace_and_no_steps_are_clear_errors(tmp_path: Path) -> None:
    assert main(["scan", "report", str(tmp_path)]) == 2
    write_handmade(tmp_path, HandmadeRun(steps=3))
    with pytest.raises(ScanError, match="no whole step"):
        write_report(tmp_path, first_step=100)


def finding(**more: object) -> Finding:
    plain = {
        "cause": "slow_compute", "lateness": "late_arrival", "ranks": (1,), "first_step": 1, "last_step": 9,
        "lost_fraction": 0.1, "confidence": 0.9,
    }  # fmt: skip
    return Finding(**{**plain, **more})  # type: ignore[arg-type]


def wide(world: tuple[int, int, int], **more: object) -> ReportData:
    dp, pp, tp = world
    places = tuple(
        Place(rank=(p * dp + d) * tp + t, host=f"n{d}", dp=d, pp=p, tp=t)
        for p in range(pp)
        for d in range(dp)
        for t in range(tp)
    )
    data = ReportData(
        run="wide",
        simulated=False,
        layout={"dp": dp, "pp": pp, "tp": tp},
        places=places,
        first_step=1,
        last_step=9,
        findings=(finding(),),
        step_times=StepTimes(steps=tuple(range(1, 10)), seconds=(0.1,) * 9),
    )
    return replace(data, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [(32, 8, 4), (1024, 1, 1), (1, 1, 1), (3, 1, 8)])
def test_every_rank_has_its_cell_in_any_layout(world: tuple[int, int, int]) -> None:
    text = page(wide(world))
    _Page(text)
    cells = re.findall(r'class="cell [a-z]*" data-rank="(\d+)" x="(\d+)" y="(\d+)"', text)
    ranks = world[0] * world[1] * world[2]
    assert len(cells) == ranks == len({(x, y) for _, x, y in cells})


def test_names_from_the_trace_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>\"'&"
    named = finding(host=evil, evidence=(evil,), advice=evil, group=evil)
    data = wide((2, 1, 1), run=evil, findings=(named,), notes=(evil,), stacks={0: evil})
    data = replace(data, places=tuple(replace(place, host=evil) for place in data.places))
    text = page(data)
    assert "<script>alert" not in text and text.count("<script>") == 1
    _Page(text)
    assert markdown(data)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "Rank 1 computes slowly"),
        ({"ranks": (1, 2, 3), "cause": "uneven_work"}, "Ranks 1-3 have more work than the others"),
        ({"ranks": (3, 7), "cause": "slow_link"}, "The link between ranks 3 and 7 is slow"),
        ({"ranks": (3, 4), "cause": "slow_link"}, "The link between ranks 3 and 4 is slow"),
        (
            {"cause": "hang", "group": "pp", "details": {"collective": "send", "seq": 7, "ranks": [3, 1]}},
            "Rank 1 keeps the others waiting: send number 7 from rank 3 to rank 1 does not end",
        ),
        (
            {"cause": "hang", "group": "dp", "details": {"collective": "all_reduce", "seq": 12}},
            "Rank 1 keeps the others waiting: all_reduce number 12 of the dp group does not end",
        ),
        ({"cause": "unknown", "confidence": 0.2}, "Rank 1 delays the run, cause unknown"),
        ({"cause": "unknown", "ranks": ()}, "Something delays the run, cause unknown"),
    ],
)
def test_headlines(more: dict[str, object], words: str) -> None:
    assert headline(finding(**more)) == words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("own work is slow", "Own work is slow."),
        ("dp operations", "dp operations."),
        ("Done.", "Done."),
        ("", ""),
    ],
)
def test_evidence_becomes_sentences(text: str, shown: str) -> None:
    assert sentence(text) == shown


def test_rank_lists() -> None:
    assert rank_list((8, 1, 0, 2, 3, 5, 6)) == "0-3, 5, 6, 8" and rank_list(()) == ""


def test_reading_and_reporting_need_neither_torch_nor_megatron(slow: ReportFiles, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from mt_megatron.scan.report.gather import write_report\n"
        "from mt_megatron.scan.export.chrome import write_chrome\n"
        "from mt_megatron.scan.export.pftrace import write_pftrace\n"
        "from mt_megatron.scan.analysis.trace import open_trace\n"
        "import mt_megatron.scan.monitor.alerts, mt_megatron.scan.monitor.status\n"
        "import mt_megatron.scan.export.sql\n"
        f"write_report({str(slow.html.parents[2])!r}, __import__('pathlib').Path({str(tmp_path / 'r')!r}))\n"
        "found = {name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'duckdb', 'pyarrow'}\n"
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_status_shows_steps_and_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=5))
    status = run_status(tmp_path)
    assert (status.step, len(status.ranks)) == (5, 4) and status.step_seconds == pytest.approx(0.1, rel=0.2)
    assert main(["scan", "status", str(tmp_path)]) == 0
    assert "4 ranks, step 5" in capsys.readouterr().out
    run_files(tmp_path).findings.write_text(json.dumps(finding().to_dict()) + "\n")
    assert main(["scan", "status", str(tmp_path)]) == 1
    assert "Rank 1 computes slowly: 10.0 %" in capsys.readouterr().out
    assert main(["scan", "status", str(tmp_path), "--every", "0"]) == 2
    capsys.readouterr()
    files = run_files(tmp_path)
    write_run(files, {**read_run(files), "started_unix_ns": 200_000_000_000})
    files.findings.write_text(json.dumps({**finding().to_dict(), "time_unix": 199.0}) + "\n")
    assert main(["scan", "status", str(tmp_path)]) == 0, "found before the run was started again"
    files.findings.write_text(json.dumps({**finding().to_dict(), "time_unix": 201.0}) + "\n")
    assert main(["scan", "status", str(tmp_path)]) == 1


def test_status_before_the_first_step_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=1))
    for path in (tmp_path / "scan").glob("rank-*/*.scan"):
        writer = SegmentWriter(path.with_suffix(".new"), 0, {"rank": 0})
        writer.close()
        path.with_suffix(".new").rename(path)
    assert main(["scan", "status", str(tmp_path), "--json"]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["ranks"][0]["step_seconds"] is None and found["step"] == -1


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '"text"',
        '{"cause": "slow_compute"}',
        json.dumps({**finding().to_dict(), "cause": "of a later version"}),
        json.dumps({"cause": "slow_compute", "ranks": 5, "lost_fraction": "much"}),
    ],
)
def test_lines_that_are_no_findings_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=3))
    run_files(tmp_path).findings.write_text(line + "\n")
    assert main(["scan", "status", str(tmp_path)]) == 0
    assert "nothing found so far" in capsys.readouterr().out
    run_files(tmp_path).findings.write_text(line + "\n" + json.dumps(finding().to_dict()) + "\n")
    assert main(["scan", "status", str(tmp_path)]) == 1, "the control"


@pytest.mark.parametrize("text", ["x", "1-", "-3", "1,,2", "", "3-1"])
def test_rank_options_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=2))
    assert main(["scan", "trace", str(tmp_path), f"--ranks={text}"]) == 2


def test_the_trace_command_writes_both_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=2))
    assert main(["scan", "trace", str(tmp_path)]) == 0
    assert main(["scan", "trace", str(tmp_path), "--format", "perfetto", "--ranks", "0-1,3"]) == 0
    assert (tmp_path / "scan" / "trace.json.gz").exists() and "of 3 ranks" in capsys.readouterr().out
