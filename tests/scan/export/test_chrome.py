"""The Chrome trace fits the format's schema, nests on every track, and joins every send with its receive."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from mt_megatron.cli.main import main
from mt_megatron.scan.analysis.trace import open_trace
from mt_megatron.scan.export import chrome
from mt_megatron.scan.export.chrome import write_chrome
from mt_megatron.scan.export.rank_stream import Selection, pieces
from mt_megatron.scan.export.tracks import Lanes, Plotted, counter_points
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.format.records import ASYNC, COUNTER, KIND, OPEN, SPAN
from mt_megatron.scan.format.run_files import run_files, segment_path
from mt_megatron.scan.format.segments import SegmentWriter
from tests.scan.handmade import MS, NAME, HandmadeRun, write_handmade

_NUMBER, _PLACE = {"type": "number", "minimum": 0}, {"type": "integer", "minimum": 0}
# Of text Perfetto's importer takes hexadecimal numbers of 64 bits alone, and drops the arrow of any other.
_FLOW = {"type": "string", "pattern": "^0x[0-9a-f]{1,16}$"}
_OF_PHASE = {
    "X": {"required": ["ts", "dur", "tid", "name", "cat"], "properties": {"ts": _NUMBER, "dur": _NUMBER}},
    "M": {"required": ["name", "args"], "properties": {"args": {"type": "object"}}},
    "C": {
        "required": ["ts", "name", "args"],
        "properties": {"args": {"additionalProperties": {"type": "number"}, "minProperties": 1}},
    },
    "s": {"required": ["ts", "tid", "id", "name", "cat"], "properties": {"id": _FLOW}},
    "f": {
        "required": ["ts", "tid", "id", "name", "cat", "bp"],
        "properties": {"bp": {"const": "e"}, "id": _FLOW},
    },
}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "pid"],
                "properties": {"ph": {"enum": list(_OF_PHASE)}, "pid": _PLACE, "tid": _PLACE},
                "allOf": [
                    {"if": {"properties": {"ph": {"const": phase}}}, "then": rule}
                    for phase, rule in _OF_PHASE.items()
                ],
            },
        },
    },
}
"""What the viewers need of the events that are used here, written from the format's description."""


def export(run: Path, selection: Selection | None = None) -> dict[str, Any]:
    path = run / "t.json.gz"
    write_chrome(open_trace(run), path, selection or Selection())
    with gzip.open(path) as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def overlaps(trace: dict[str, Any]) -> int:
    """Spans of one track that overlap without one lying within the other."""
    tracks = defaultdict(list)
    for event in events(trace, "X"):
        begin = round(event["ts"] * 1000)
        tracks[event["pid"], event["tid"]].append((begin, -(begin + round(event["dur"] * 1000))))
    found = 0
    for spans in tracks.values():
        stack: list[int] = []
        for begin, end in sorted(spans):
            while stack and stack[-1] <= begin:
                stack.pop()
            found += bool(stack and stack[-1] < -end)
            stack.append(-end)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chrome") / "my-run"
    folder.mkdir()
    write_handmade(folder, HandmadeRun(steps=4))
    return folder


def test_fits_the_schema_and_says_who_is_who(run: Path) -> None:
    trace = export(run)
    jsonschema.validate(trace, SCHEMA)
    names = {e["pid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "process_name"}
    assert names[3] == "rank 3 (dp 1 pp 1 tp 0) node-1" and set(names) == {0, 1, 2, 3}
    counts = Counter(event["cat"] for event in events(trace, "X"))
    assert counts == {
        "step": 16, "data": 16, "forward": 32, "backward": 32, "p2p": 64, "collective": 16, "optimizer": 16,
    }  # fmt: skip
    assert {event["name"] for event in events(trace, "C")} == {
        "recorder late, ms",
        "processors in use",
    }
    late = [e["args"]["value"] for e in events(trace, "C") if e["name"] == "recorder late, ms"]
    assert late == 4 * ([2.0] + 7 * [0.0])
    values = [e["args"]["value"] for e in events(trace, "C") if e["name"] == "processors in use"]
    assert values == pytest.approx([0.9] * len(values), abs=1e-6)


def test_the_schema_can_fail(run: Path) -> None:
    trace = export(run)
    del events(trace, "f")[0]["bp"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(trace, SCHEMA)


def test_spans_nest_on_every_track_and_the_check_can_fail(run: Path) -> None:
    trace = export(run)
    assert overlaps(trace) == 0
    step = next(event for event in events(trace, "X") if event["cat"] == "step")
    step["dur"] -= 10
    assert overlaps(trace) > 0


def test_every_send_is_joined_with_its_receive_and_none_points_back(run: Path) -> None:
    trace = export(run)
    sent = {event["id"]: event for event in events(trace, "s")}
    received = {event["id"]: event for event in events(trace, "f")}
    assert set(sent) == set(received) and len(sent) == len(events(trace, "s")) == 4 * 2 * 2 * 2
    for name, event in sent.items():
        assert (event["pid"], received[name]["pid"]) == edge(name)
        assert received[name]["ts"] >= event["ts"]


def edge(arrow: str) -> tuple[int, int]:
    number = int(arrow, 16)
    return number >> 48, number >> 32 & 0xFFFF


def test_an_arrow_that_perfetto_would_drop_breaks_the_schema(run: Path) -> None:
    trace = export(run)
    events(trace, "s")[0]["id"] = "0-2-1"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(trace, SCHEMA)


def test_both_ends_of_an_arrow_lie_within_a_transfer_of_their_track(run: Path) -> None:
    trace = export(run)
    spans = [event for event in events(trace, "X") if event["cat"] == "p2p"]
    for arrow in events(trace, "s") + events(trace, "f"):
        assert any(
            (span["pid"], span["tid"]) == (arrow["pid"], arrow["tid"])
            and span["ts"] <= arrow["ts"] < span["ts"] + span["dur"]
            for span in spans
        )


def test_an_arrow_without_its_other_side_is_left_out(run: Path) -> None:
    trace = export(run, Selection(ranks=frozenset((0, 1, 2))))
    jsonschema.validate(trace, SCHEMA)
    assert {edge(event["id"]) for event in events(trace, "s")} == {(0, 2), (2, 0)}
    assert {e["pid"] for e in events(trace, "X")} == {0, 1, 2}


def test_steps_can_be_chosen(run: Path) -> None:
    trace = export(run, Selection(first_step=2, last_step=3))
    assert {event["args"]["step"] for event in events(trace, "X")} == {2, 3}
    assert min(event["ts"] for event in events(trace, "X")) == 0


def test_ranks_with_clocks_of_their_own_lie_on_one(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=4, offsets={1: 10**9, 3: -(10**9)}))
    trace = export(tmp_path)
    begins = {(e["pid"], e["args"]["step"]): e["ts"] for e in events(trace, "X") if e["cat"] == "step"}
    spread = [abs(begins[rank, step] - begins[rank - 1, step]) for rank in (1, 3) for step in (1, 2, 3, 4)]
    assert max(spread) < 50.0, spread
    assert all(
        received["ts"] >= sent["ts"]
        for sent in events(trace, "s")
        for received in events(trace, "f")
        if sent["id"] == received["id"]
    )


def test_what_never_ended_lasts_to_the_last_thing_known_and_says_so(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=2))
    folder = run_files(tmp_path).rank_folder(0)
    spans = np.zeros(2, dtype=SPAN)
    spans["kind"], spans["iteration"], spans["peer"], spans["microbatch"] = KIND["collective"], 3, -1, -1
    spans["begin"], spans["end"] = (2_000 * MS, 2_001 * MS), (OPEN, 2_005 * MS)
    writer = SegmentWriter(
        segment_path(folder, 1), 0, {"rank": 0, "boot_id": "boot-all", "clock": "monotonic"}
    )
    writer.strings([""])
    writer.spans(spans)
    writer.close()
    (event,) = [e for e in events(export(tmp_path), "X") if e["args"].get("unfinished")]
    assert event["dur"] == 5_000.0


def test_a_step_in_two_segments_is_one_piece(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=3))
    folder = run_files(tmp_path).rank_folder(0)
    path = segment_path(folder, 0)
    trace = open_trace(tmp_path)
    whole = np.concatenate([piece.spans for piece in pieces(trace, 0)])
    rows = trace.rank(0)
    path.unlink()
    cut = len(whole) // 2 + 3
    for number, part in enumerate((whole[:cut], whole[cut:])):
        writer = SegmentWriter(segment_path(folder, number), 0, rows.meta)
        writer.strings(rows.strings)
        writer.groups(rows.groups)
        writer.spans(part)
        writer.close()
    steps = [set(piece.spans["iteration"].tolist()) for piece in pieces(open_trace(tmp_path), 0)]
    assert len(steps) == 2 and not steps[0] & steps[1]
    again = np.concatenate([piece.spans for piece in pieces(open_trace(tmp_path), 0)])
    assert np.array_equal(np.sort(again, order="begin"), np.sort(whole, order="begin"))


def test_a_step_keeps_its_names_in_front_of_a_segment_without_any(tmp_path: Path) -> None:
    """Its process was killed as it began the segment, before it wrote the tables."""
    write_handmade(tmp_path, HandmadeRun(steps=2))
    whole = export(tmp_path)
    folder = run_files(tmp_path).rank_folder(0)
    meta = open_trace(tmp_path).rank(0).meta
    SegmentWriter(segment_path(folder, 1), 0, meta).close()
    assert len(list(pieces(open_trace(tmp_path), 0))) == 2
    names = [
        Counter((event["name"], event["args"]["step"]) for event in events(trace, "X"))
        for trace in (whole, export(tmp_path))
    ]
    assert names[0] == names[1] and names[0]["dp all_reduce", 2] == 4


def test_device_times_and_kernels_have_tracks_of_their_own(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=2))
    folder = run_files(tmp_path).rank_folder(0)
    read = open_trace(tmp_path).rank(0)
    passes = read.spans[np.isin(read.spans["kind"], [KIND["forward"], KIND["collective"]])]
    spans = passes.copy()
    spans["iteration"] = 3
    spans["device_begin"], spans["device_end"] = spans["begin"] + 5 * MS, spans["end"] + 5 * MS
    kernels = spans[:2].copy()
    kernels["kind"], kernels["begin"], kernels["end"] = KIND["kernel"], 2_000 * MS, 2_001 * MS
    # Two streams: they overlap without one lying within the other.
    kernels["device_begin"], kernels["device_end"] = (2_010 * MS, 2_012 * MS), (2_014 * MS, 2_016 * MS)
    writer = SegmentWriter(segment_path(folder, 1), 0, read.meta)
    writer.strings(read.strings)
    writer.groups(read.groups)
    writer.spans(np.concatenate((spans, kernels)))
    writer.close()
    trace = export(tmp_path, Selection(ranks=frozenset((0,)), first_step=3))
    jsonschema.validate(trace, SCHEMA)
    assert overlaps(trace) == 0
    names = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    count = Counter(names[event["tid"]] for event in events(trace, "X"))
    communication = int((passes["kind"] == KIND["collective"]).sum())
    assert count["device: communication"] == communication
    assert count["device"] == len(passes) - communication
    assert count["device: kernels"] == count["device: kernels (2)"] == 1
    # On the host each is there too, the kernels only where they ran.
    assert count["training thread"] + count["training thread (2)"] == len(passes)


def test_a_step_in_which_a_receive_was_only_started_is_written_too(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=2))
    folder = run_files(tmp_path).rank_folder(0)
    read = open_trace(tmp_path).rank(0)
    spans = read.spans[read.spans["kind"] == KIND["p2p"]][:1].copy()
    spans["name"], spans["flags"], spans["iteration"], spans["seq"] = NAME["recv"], ASYNC, 3, 4
    writer = SegmentWriter(segment_path(folder, 1), 0, read.meta)
    writer.strings(read.strings)
    writer.groups(read.groups)
    writer.spans(spans)
    writer.close()
    trace = export(tmp_path, Selection(first_step=3, last_step=3))
    assert [event["name"] for event in events(trace, "X")] == ["recv from 2 (start)"]
    assert not events(trace, "s") and not events(trace, "f")


def test_what_does_not_nest_goes_on_to_another_lane() -> None:
    lanes = Lanes()
    assert [lanes.place(0, *span) for span in ((0, 10), (2, 5), (4, 12), (11, 13), (12, 20))] == [
        0,
        0,
        1,
        0,
        1,
    ]


def test_a_counter_that_is_no_number_does_not_spoil_the_trace() -> None:
    counters = np.zeros(3, dtype=COUNTER)
    counters["time"], counters["value"], counters["name"] = (1, 2, 3), (5.0, np.nan, np.inf), 1
    assert list(counter_points(counters, ("", "mine"), Plotted())) == [(1, "mine", 5.0)]


def test_findings_lie_over_their_steps(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=4))
    finding = Finding(
        cause="slow_compute",
        lateness="late_arrival",
        ranks=(1,),
        first_step=2,
        last_step=3,
        lost_fraction=0.1,
        confidence=0.9,
    )
    row = {**finding.to_dict(), "time_unix": 1.0, "named_at_step": 3}
    run_files(tmp_path).findings.write_text(json.dumps(row) + "\n" + '{"torn')
    trace = export(tmp_path)
    jsonschema.validate(trace, SCHEMA)
    (event,) = [e for e in events(trace, "X") if e["cat"] == "finding"]
    assert event["name"] == "Rank 1 computes slowly"
    inside = [e for e in events(trace, "X") if e["cat"] == "step" and e["args"]["step"] in (2, 3)]
    assert event["ts"] == pytest.approx(min(e["ts"] for e in inside))


def test_nothing_is_left_behind_when_the_export_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=1))

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(chrome, "_findings", full)
    with pytest.raises(OSError, match="no space"):
        write_chrome(open_trace(tmp_path), tmp_path / "out" / "t.json.gz")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_names_files_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=2))
    path = segment_path(run_files(tmp_path).rank_folder(1), 1)
    path.write_bytes(bytes(4096))
    words = ["scan", "trace", str(tmp_path), "--output", str(tmp_path / "t.json")]
    assert main(words) == 1
    assert f"not in the result: {path} is no segment of a trace" in capsys.readouterr().err
    assert main([*words, "--ranks", "0,2-3"]) == 0
    assert capsys.readouterr().err == "", "nothing is missing of the ranks asked for"
