"""The background thread: bounded files, bounded memory, whole records, everything written by the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from mt_megatron.scan.format.names import TOO_MANY, Names
from mt_megatron.scan.format.records import SPAN
from mt_megatron.scan.format.run_files import segment_paths
from mt_megatron.scan.format.segment_retention import SegmentRing
from mt_megatron.scan.format.segments import Group, dropped_events, read_rank, read_segments, segment_meta
from mt_megatron.scan.record import queues
from mt_megatron.scan.record.queues import Queues
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events
from tests.scan.format.test_segments import spans
from tests.scan.recordings import record, rows, step


def test_what_is_written_appears_while_the_run_goes_on(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        step(1)
        folder = recorder.files.rank_folder(0)
        deadline = time.monotonic() + 60
        # The first flush may come in the middle of the step.
        while len(rows(read_rank(folder))) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(rows(read_rank(folder))) == 5

    record(tmp_path, act)


def test_many_events_of_many_threads_all_arrive(tmp_path: Path) -> None:
    each, threads = 4_000, 4

    def emit(thread: int) -> None:
        for number in range(each):
            with events.span("collective", op=f"op{thread}", group="dp", ranks=(0, 1), seq=number):
                pass

    def act(recorder: Recorder) -> None:
        started = [threading.Thread(target=emit, args=(thread,)) for thread in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    trace = record(tmp_path, act)
    for thread in range(threads):
        mine = trace.spans[trace.spans["name"] == trace.strings.index(f"op{thread}")]
        assert mine["seq"].tolist() == [*range(each)]
        assert len(set(mine["thread"])) == 1
    assert not [note for note in trace.notes if note["what"] == "dropped"]


def test_the_files_stay_within_their_bound_and_each_can_be_read_alone(tmp_path: Path) -> None:
    most = 1 << 20
    names = Names()
    ring = SegmentRing(tmp_path / "scan" / "rank-00000", 0, names, {"dp": 1}, most_bytes=most)
    sizes = []
    for number in range(100):
        made = spans(400, first=400 * number)
        made["name"], made["group"] = names.string(f"name {number}"), names.group("tp", (0, number))
        ring.write(
            spans=made.tobytes(),
            notes=({"what": "x", "number": number},),
            threads=lambda: {"0": "MainThread"},
        )
        sizes.append(sum(path.stat().st_size for path in segment_paths(tmp_path / "scan" / "rank-00000")))
    ring.close()
    assert max(sizes) <= most and sizes[-1] > most // 2
    paths = segment_paths(tmp_path / "scan" / "rank-00000")
    assert paths[0].name != "000000.scan", "the oldest were removed"
    for path in paths:
        alone = read_segments([path])
        assert alone.meta["dp"] == 1 and alone.meta["session"] == 0
        for span in alone.spans:
            number = int(span["begin"]) // 400
            assert alone.strings[span["name"]] == f"name {number}"
            assert alone.groups[int(span["group"])] == Group(name="tp", ranks=(0, number))
    whole = read_rank(paths[0].parent)
    first = int(whole.spans["begin"][0])
    assert whole.spans["begin"].tolist() == [*range(first, 40_000)]


def test_the_bound_holds_over_several_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "scan" / "rank-00000"
    for session in range(4):
        ring = SegmentRing(folder, 0, Names(), {}, most_bytes=1 << 20)
        for _ in range(30):
            ring.write(spans=spans(400).tobytes())
        ring.close()
        assert ring.meta["session"] == session
        assert sum(path.stat().st_size for path in segment_paths(folder)) <= 1 << 20
    found = [segment_meta(path) for path in segment_paths(folder)]
    assert [each["session"] for each in found if each] == sorted(each["session"] for each in found if each)


def test_a_broken_segment_of_an_earlier_run_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / "scan" / "rank-00000"
    folder.mkdir(parents=True)
    (folder / "000000.scan").write_bytes(b"")
    trace = record(tmp_path, lambda recorder: step(1))
    assert len(rows(trace)) == 5
    assert [path.name for path in segment_paths(folder)] == ["000000.scan", "000001.scan"]


def test_memory_is_bounded_in_bytes_when_nobody_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MOST_BYTES", 6000)
    waiting = Queues()
    for number in range(20):
        waiting.events.append((number, 0, "begin", "layer", {}))
        waiting.counters.append((number, 1.0, 0, 0))
    waiting.spans += [bytes(SPAN.itemsize * 50)]
    waiting.bound()
    assert (len(waiting.events), len(waiting.spans), waiting.dropped) == (20, 1, {}), "all of it fits"
    waiting.events.append((20, 0, "begin", "layer", {}))
    waiting.notes.append({})
    waiting.spans += [bytes(SPAN.itemsize * 50)]
    waiting.bound()
    assert (waiting.events, waiting.notes, waiting.spans, len(waiting.counters)) == ([], [], [], 20)
    assert waiting.dropped == {"events": 21, "notes": 1, "spans": 100}
    waiting.events.append((0, 0, "begin", "layer", {}))
    waiting.bound()
    assert len(waiting.events) == 1


def test_a_disk_that_hangs_costs_events_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queues, "MOST_BYTES", 30_000)
    hanging, entered = threading.Event(), threading.Event()
    write = SegmentRing.write

    def hang(self: SegmentRing, **records: object) -> None:
        if records.get("spans"):
            entered.set()
            hanging.wait(60)
        write(self, **records)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentRing, "write", hang)

    def act(recorder: Recorder) -> None:
        step(1)
        assert entered.wait(60)
        for iteration in range(2, 52):
            step(iteration)
        assert len(recorder._queues.events) <= 120
        hanging.set()

    trace = record(tmp_path, act)
    (note,) = [note for note in trace.notes if note["what"] == "dropped"]
    assert note["events"] == sum(note["of"].values()) and note["of"]["events"] >= 300
    assert dropped_events([*trace.notes, *trace.notes]) == note["events"], "it is the number so far"
    assert "tracing has dropped" in caplog.text


def test_names_are_numbered_once_and_run_out_gracefully(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_megatron.scan.format.names._MOST", 4)
    names = Names()
    assert [names.string(text) for text in ("", "a", "b", "a", "c", "d", "e", "a")] == [
        0,
        1,
        2,
        1,
        3,
        4,
        4,
        1,
    ]
    assert names.strings == ["", "a", "b", "c", TOO_MANY]
    members = (0, 1)
    assert names.group("tp", members) == names.group("tp", (0, 1)) == names.group("tp", [0, 1]) == 1
    assert names.group("dp", members) == 2 and names.group("dp", None) == names.group("dp", ()) == 3
    assert [names.group("x", (number,)) for number in range(3)] == [4, 0, 0]


def test_names_of_many_threads_agree() -> None:
    names = Names()
    found: list[list[int]] = []

    def ask() -> None:
        found.append([names.string(f"n{number}") for number in range(2_000)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each == found[0] for each in found) and len(set(found[0])) == 2_000
    assert [names.strings[number] for number in found[0]] == [f"n{number}" for number in range(2_000)]
