"""Events become spans; levels change between steps; whatever fails switches the tracing off, never a step."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.errors import ConfigError, ScanError
from mt_megatron.scan.analysis.trace import open_trace
from mt_megatron.scan.format.records import ASYNC, KIND, OPEN, SPAN, WAIT
from mt_megatron.scan.format.segment_retention import SegmentRing
from mt_megatron.scan.format.segments import Group, read_rank, sessions
from mt_megatron.scan.record.levels import Window, level_at
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events
from tests.scan.recordings import MEMBERS, counters, record, rows, step


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("scan-")]


@pytest.fixture(autouse=True)
def nobody_listens_afterwards() -> Any:
    callbacks = len(gc.callbacks)
    yield
    assert not events.listening()
    assert len(gc.callbacks) == callbacks
    # After a failure the recorder's threads end by themselves, a moment later on a busy machine.
    deadline = time.monotonic() + 60
    while (left := _threads()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_a_step_becomes_spans(tmp_path: Path) -> None:
    trace = record(tmp_path, lambda recorder: [step(1), step(2)], rank=3, level="full")
    assert rows(trace, "iteration", "microbatch", "chunk", "seq", "bytes") == [
        row
        for iteration in (1, 2)
        for row in [
            ("step", "step", iteration, -1, -1, -1, -1),
            ("microbatch", "forward", iteration, 0, 1, -1, -1),
            ("forward", "forward", iteration, 0, 1, -1, -1),
            ("layer", "layers.3", iteration, 0, 1, -1, -1),
            ("collective", "all_reduce", iteration, 0, 1, iteration, 64),
            ("optimizer", "AdamW", iteration, -1, -1, -1, -1),
        ]
    ]
    assert trace.groups == {1: Group(name="tp", ranks=MEMBERS)}
    (collective, *_) = trace.spans[trace.spans["kind"] == KIND["collective"]]
    assert collective["group"] == 1 and 0 < collective["begin"] <= collective["end"]
    assert trace.meta["rank"] == 3 and trace.meta["pid"] == os.getpid()
    assert abs(trace.meta["unix_ns"] - time.time_ns()) < 3600e9


def test_level_base_leaves_layers_out(tmp_path: Path) -> None:
    kinds = [row[0] for row in rows(record(tmp_path, lambda recorder: step(1)))]
    assert kinds == ["step", "microbatch", "forward", "collective", "optimizer"]


def test_a_transfer_is_one_span_per_direction(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        transfers = (("send", 1, 4, 10), ("recv", 2, 5, -1))
        with events.span("p2p", group="pp", ranks=MEMBERS, bytes=10, transfers=transfers):
            pass

    trace = record(tmp_path, act)
    assert rows(trace, "peer", "seq", "bytes") == [("p2p", "send", 1, 4, 10), ("p2p", "recv", 2, 5, -1)]
    assert len({row[2:] for row in rows(trace, "begin", "end")}) == 1, "both at once"


def test_starts_and_waits_that_overlap(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        for seq in (0, 1):
            with events.span("collective", op="start_grad_sync", group="dp", seq=seq, asynchronous="start"):
                pass
        with events.span("collective", op="finish_grad_sync", group="dp", seq=0, asynchronous="wait"):
            pass
        # Issued here and waited for after something else has begun.
        events.begin("collective", op="all_gather", group="tp")
        events.begin("layer", number=1)
        events.end("collective")
        events.end("layer")

    trace = record(tmp_path, act, level="full")
    assert rows(trace, "seq", "flags") == [
        ("collective", "start_grad_sync", 0, ASYNC),
        ("collective", "start_grad_sync", 1, ASYNC),
        ("collective", "finish_grad_sync", 0, WAIT),
        ("collective", "all_gather", -1, 0),
        ("layer", "layers.1", -1, 0),
    ]


def test_what_follows_a_micro_batch_is_no_part_of_it(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        with events.span("microbatch", direction="forward", microbatch=2, chunk=0):
            with events.span("collective", op="all_reduce", seq=0):
                pass
            events.begin("collective", op="all_reduce", seq=1)
            events.end("collective")
        with events.span("collective", op="all_reduce", seq=2):
            pass
        events.begin("collective", op="all_reduce", seq=3)
        events.end("collective")

    found = rows(record(tmp_path, act), "seq", "microbatch")
    assert [row[2:] for row in found if row[0] == "collective"] == [(0, 2), (1, 2), (2, -1), (3, -1)]


def test_spans_that_never_end_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_megatron.scan.record.encoder._MOST_UNENDED", 5)

    def act(recorder: Recorder) -> None:
        for number in range(20):
            events.span("collective", op="all_reduce", seq=number).__enter__()
        step(1)

    trace = record(tmp_path, act)
    assert [row[2] for row in rows(trace, "seq", "end") if row[3] == OPEN] == [*range(15, 20)]
    assert ("step", "step") in rows(trace)


def test_what_the_end_has_learnt_counts(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        events.begin("data")
        events.end("data", work=123)
        events.begin("checkpoint", op="write")
        events.end("checkpoint", bytes=9)

    assert rows(record(tmp_path, act), "work", "bytes") == [
        ("data", "data", 123, -1),
        ("checkpoint", "write", 0, 9),
    ]


def test_threads_are_told_apart(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        inside, done = threading.Event(), threading.Event()

        def other() -> None:
            with events.span("layer", number=2):
                inside.set()
                done.wait(60)

        thread = threading.Thread(target=other)
        with events.span("layer", number=1):
            thread.start()
            inside.wait(60)
        done.set()
        thread.join()

    trace = record(tmp_path, act, level="full")
    assert sorted(row[1] for row in rows(trace)) == ["layers.1", "layers.2"]
    assert len(set(trace.spans["thread"][trace.spans["kind"] == KIND["layer"]])) == 2


def test_an_end_without_its_begin_is_passed_over(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        events.end("layer")
        for _ in range(1000):
            events.begin("layer", number=1)
        step(1)

    trace = record(tmp_path, act, level="full")
    assert [row[:2] for row in rows(trace) if row[0] == "step"] == [("step", "step")]
    layers = trace.spans[trace.spans["kind"] == KIND["layer"]]
    assert (layers["end"] == OPEN).sum() < 300, "begins without an end must not pile up"


def test_what_is_still_open_at_the_end_is_written(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        events.begin("collective", op="all_reduce", group="dp", ranks=MEMBERS, seq=41)

    trace = record(tmp_path, act)
    assert rows(trace, "seq", "end") == [("collective", "all_reduce", 41, OPEN)]


def test_a_long_span_is_seen_before_it_ends_and_once_afterwards(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        events.begin("collective", op="all_reduce", group="dp", ranks=MEMBERS, seq=7)
        deadline = time.monotonic() + 60
        folder = recorder.files.rank_folder(0)
        while not (read_rank(folder).spans["end"] == OPEN).any() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert rows(read_rank(folder), "seq", "end") == [("collective", "all_reduce", 7, OPEN)]
        events.end("collective")

    trace = record(tmp_path, act)
    assert len(rows(trace)) == 1 and trace.spans["end"][0] > trace.spans["begin"][0]


def test_attributes_that_fit_no_record_are_counted_and_raise_nothing(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        with events.span("collective", op="all_reduce", bytes="many"), events.span("layer", number=None):
            pass
        step(1)

    trace = record(tmp_path, act, level="full")
    assert [note["events"] for note in trace.notes if note["what"] == "dropped"] == [1]
    assert ("step", "step") in rows(trace)


def test_counters_notes_pings_and_foreign_spans(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        recorder.counter("data_queue_depth", 4)
        recorder.note(what="stack", stacks={"MainThread": ["f"]})
        recorder.ping(1, sent=10, received=20, answered=21, returned=30)
        made = np.zeros(1, SPAN)
        made["begin"], made["end"], made["kind"] = 5, 9, KIND["kernel"]
        made["name"], made["group"] = recorder.string("gemm"), recorder.group("tp", [0, 1])
        recorder.add_spans(made)
        with pytest.raises(ScanError, match="found spans of"):
            recorder.add_spans(np.zeros(1, np.int64))
        recorder.sample("my_depth", lambda: 7)
        recorder.sample("broken", lambda: 1 / 0)

    trace = record(tmp_path, act)
    assert counters(trace)["data_queue_depth"] == [4.0]
    assert set(counters(trace)["my_depth"]) == {7.0} and "broken" not in counters(trace)
    (note,) = [note for note in trace.notes if note["what"] == "stack"]
    assert note["stacks"] == {"MainThread": ["f"]} and note["time"] > 0
    assert trace.pings.tolist() == [(10, 20, 21, 30, 1, 0)]
    assert rows(trace, "begin", "end") == [("kernel", "gemm", 5, 9)]
    assert trace.groups == {1: Group(name="tp", ranks=(0, 1))}


def test_levels_change_between_steps_in_the_training_thread(tmp_path: Path) -> None:
    changes: list[tuple[str, str, bool]] = []

    def act(recorder: Recorder) -> None:
        threading.Thread(target=recorder.set_level, args=("full",)).start()
        while recorder._listening._wanted != "full":
            time.sleep(0.01)
        assert recorder.level == "base"
        step(1, lambda: recorder.set_level("base"))
        assert recorder.level == "full", "in the middle of a step nothing changes"
        step(2, lambda: recorder.set_level("off"))
        step(3)
        assert recorder.level == "off" and events.listening(), "operations are counted on"
        step(4)
        recorder.set_level("base")
        step(5)

    def run(recorder: Recorder) -> None:
        main = threading.get_ident()
        recorder.on_level(lambda old, new: changes.append((old, new, threading.get_ident() == main)))
        act(recorder)

    trace = record(tmp_path, run)
    assert changes[:5] == [
        ("base", "full", True),
        ("full", "base", True),
        ("base", "off", True),
        ("off", "base", True),
        ("base", "off", True),
    ]
    steps = [row[2] for row in rows(trace, "iteration") if row[0] == "step"]
    layers = [row[2] for row in rows(trace, "iteration") if row[0] == "layer"]
    assert (steps, layers) == ([1, 2, 5], [1])
    assert not (trace.spans["end"] == OPEN).any()


def test_windows_raise_the_level_of_some_steps(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        for iteration in range(1, 8):
            step(iteration)

    trace = record(tmp_path / "base", act, window=Window(every=3, steps=1, level="full"))
    assert [row[2] for row in rows(trace, "iteration") if row[0] == "layer"] == [1, 4, 7]
    assert [row[2] for row in rows(trace, "iteration") if row[0] == "step"] == [*range(1, 8)]
    trace = record(tmp_path / "off", act, level="off", window=Window(every=3, steps=2, level="base"))
    assert [row[2] for row in rows(trace, "iteration") if row[0] == "step"] == [1, 2, 4, 5, 7]


def test_windows_and_levels_say_what_is_wrong() -> None:
    assert Window.parse("100:2:kernel") == Window(every=100, steps=2, level="kernel")
    assert Window.parse("5") == Window(every=5, steps=1, level="full")
    assert Window.from_dict(Window(every=4).to_dict()) == Window(every=4)
    assert level_at("full", Window(every=2, level="base"), 1) == "full", "a window lowers nothing"
    for text in ("", "a", "5:", "5:1:full:x", "5:1:loud", "0", "2:3"):
        with pytest.raises(ConfigError, match="expected"):
            Window.parse(text)
    for value in ({}, {"every": 2, "more": 1}, [], {"every": True}):
        with pytest.raises(ConfigError, match="expected"):
            Window.from_dict(value)
    with pytest.raises(ConfigError, match="found level 'loud', expected one of off, base, full, kernel"):
        Recorder("x", rank=0, level="loud")  # type: ignore[arg-type]


def test_a_program_without_step_events_has_steps_by_its_optimizer(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        for _ in range(3):
            with events.span("forward"):
                pass
            with events.span("optimizer", optimizer="Chained"), events.span("optimizer", optimizer="AdamW"):
                pass

    trace = record(tmp_path, act)
    by_kind = {
        kind: [row[2] for row in rows(trace, "iteration") if row[0] == kind] for kind in ("step", "forward")
    }
    assert by_kind == {"step": [0, 1, 2], "forward": [0, 1, 2]}
    steps = trace.spans[trace.spans["kind"] == KIND["step"]]
    assert (steps["begin"][1:] == steps["end"][:-1]).all(), "one begins where the last ended"


def test_callbacks_that_raise_are_said_and_not_called_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def broken(*args: Any) -> None:
        calls.append(args)
        raise RuntimeError("no")

    def act(recorder: Recorder) -> None:
        recorder.on_level(broken)
        recorder.set_level("full")
        step(1)
        step(2)
        recorder.set_level("base")
        step(3)

    record(tmp_path, act)
    assert calls == [("base", "full")]
    assert [each.getMessage().partition(" without ")[2][-16:] for each in caplog.records] == [
        "RuntimeError: no"
    ]


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    callbacks = len(gc.callbacks)

    def act(recorder: Recorder) -> None:
        child = os.fork()
        if child == 0:
            os._exit(1 if events.listening() or len(gc.callbacks) != callbacks else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert events.listening()
        step(1)

    assert len(rows(record(tmp_path, act))) == 5


def test_a_second_run_in_the_same_folder_is_a_session_of_its_own(tmp_path: Path) -> None:
    record(tmp_path, lambda recorder: step(1))
    trace = record(tmp_path, lambda recorder: step(2))
    assert {row[2] for row in rows(trace, "iteration")} == {2}
    assert sessions(tmp_path / "scan" / "rank-00000") == [0, 1]
    assert any("was started 2 times" in note for note in open_trace(tmp_path).notes)
    assert record(tmp_path, lambda recorder: None, meta={"session": 9}).meta["session"] == 9


def test_a_recorder_is_started_once_and_closed_as_often_as_one_likes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0)
    recorder.close()
    recorder.start()
    with pytest.raises(ScanError, match="started before"):
        recorder.start()
    recorder.close()
    recorder.close()


def test_a_folder_that_cannot_be_written_is_said_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scan").write_text("a file where the folder should be")
    recorder = Recorder(tmp_path, rank=5)
    with caplog.at_level(logging.WARNING):
        recorder.start()
    assert recorder.failed is not None and recorder.level == "off"
    (said,) = [each.getMessage() for each in caplog.records]
    assert "tracing of rank 5 is off from here on, training goes on" in said
    step(1)
    recorder.set_level("full")
    recorder.counter("power_w", 1.0)
    step(2)
    recorder.close()


def test_what_follows_the_level_hears_that_the_tracing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[str, str]] = []

    def full(self: object, **records: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path, rank=0, level="full")
    recorder.on_level(lambda old, new: changes.append((old, new)))
    recorder.start()
    monkeypatch.setattr(SegmentRing, "write", full)
    deadline = time.monotonic() + 60
    while recorder.failed is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert recorder.failed is not None and changes == [("off", "full")]
    step(1)
    assert changes == [("off", "full"), ("full", "off")] and not events.listening()
    recorder.close()
    assert len(changes) == 2


def test_a_note_of_odd_things_is_written_all_the_same(tmp_path: Path) -> None:
    trace = record(
        tmp_path, lambda recorder: recorder.note(what="odd", error=ValueError("x"), more={(1, 2): 3})
    )
    assert [note["error"] for note in trace.notes if note["what"] == "odd"] == ["ValueError('x')"]


def test_hearing_changes_whenever_the_rank_gets_on(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        before = recorder.heard
        step(1)
        assert recorder.heard == before + 7
        deadline = time.monotonic() + 60
        while recorder._queues.events and time.monotonic() < deadline:
            time.sleep(0.05)
        assert recorder.heard == before + 7

    record(tmp_path, act)
