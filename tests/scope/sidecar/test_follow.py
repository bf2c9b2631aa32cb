"""The follower: each step once, alerts kept and told, sinks fed, and nothing of an earlier run again."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.recording.writer import Writer
from mt_megatron.scope.sidecar import follow
from mt_megatron.scope.sidecar.follow import Follower
from mt_megatron.scope.sidecar.keeper import Keeper
from mt_megatron.scope.sidecar.sidecar import taken_before
from mt_megatron.scope.web.live import small
from tests.scope.synthetic import RunShape, frames_of, hello, schema, stats_frame, step_frame, write_run

SHAPE = RunShape(steps=40, interval=1, tp=1, pp=1, layers=2, tensor_every=20, token_every=20, tokens=64)
SPIKE = 30


class Kept:
    """A sink that keeps what it is given, until it fails."""

    def __init__(self, title: str = "kept", fails_at: int | None = None) -> None:
        self.title = title
        self.fails_at = fails_at
        self.numbers: dict[int, dict[str, float]] = {}
        self.calls: list[int] = []
        self.closed = False

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.fails_at is not None and step >= self.fails_at:
            raise ConnectionError("the server has gone")
        self.calls.append(step)
        self.numbers.setdefault(step, {}).update(numbers)

    def close(self) -> None:
        self.closed = True


def spiked(shape: RunShape, step: int) -> RunShape:
    """Of one step all activations are 20 times as large."""
    return replace(shape, scale=20.0) if step == SPIKE else shape


def live_run(run: Path, shape: RunShape, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """A run that is followed while it is written: events and lines."""
    files = scope_files(run)
    files.root.mkdir(exist_ok=True)
    writer = Writer(files.node("node0", 0), node=0, host="node0", retain_bytes=1 << 27)
    keeper = Keeper(writer)
    events: list[dict[str, Any]] = []
    said: list[str] = []
    follower = Follower(
        files,
        keeper=keeper,
        before=writer.before,
        publish=lambda event: events.append(dict(event)),
        say=said.append,
        **options,
    )
    follower.look()
    writer.tick([(0, hello(shape, 0)), (0, schema(shape, 0))])
    for step in range(shape.first_step, shape.first_step + shape.steps):
        writer.tick([(0, frame) for frame in frames_of(spiked(shape, step), 0, step)])
        if step % 7 == 0:
            follower.look()
    follower.close()
    keeper.close()
    return events, said


def test_events_come_once_and_in_order(tmp_path: Path) -> None:
    events, said = live_run(tmp_path, SHAPE)
    assert said == []
    for kind in ("step", "stats"):
        assert [each["step"] for each in events if each["k"] == kind] == list(range(1, 41))
    assert [each["step"] for each in events if each["k"] == "tokens"] == [20, 40]
    tensors = [(each["step"], each["path"]) for each in events if each["k"] == "tensor"]
    assert tensors == [(step, f"decoder.layers.{layer}") for step in (20, 40) for layer in (0, 1)]
    json.dumps(events, allow_nan=False)  # the page sends them as they are


def test_a_planted_spike_is_kept_told_and_written(tmp_path: Path) -> None:
    events, _ = live_run(tmp_path, SHAPE)
    told = [each for each in events if each["k"] == "alert"]
    assert told and {each["step"] for each in told} == {SPIKE}
    assert "activation_rms" in {each["statistic"] for each in told}
    lines = [json.loads(line) for line in scope_files(tmp_path).alerts.read_text().splitlines()]
    assert [{"k": "alert", **line} for line in lines] == told
    with open_recording(tmp_path) as recording:
        kept = recording.alerts()
        assert [(each.step, each.text, each.session) for each in kept] == [
            (each["step"], each["text"], 0) for each in told
        ]
    assert scope_files(tmp_path).alerts.stat().st_mode & 0o777 == 0o600


def test_an_alert_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "told").mkdir()
    events, _ = live_run(tmp_path / "told", SHAPE)
    (tmp_path / "scope" / "alerts.jsonl").mkdir(parents=True)
    without, said = live_run(tmp_path, SHAPE)
    assert len(said) == 1 and "alerts.jsonl" in said[0]
    timeless = [
        [{**each, "time_ns": 0} for each in rows if each["k"] == "alert"] for rows in (events, without)
    ]
    assert len(timeless[0]) > 1 and timeless[0] == timeless[1]
    with open_recording(tmp_path) as recording:
        assert len(recording.alerts()) == len(timeless[0])


def test_a_step_beside_the_run_is_no_news_of_it(tmp_path: Path) -> None:
    """Its values raise no alert and reach no sink, though they are recorded; the step itself does both."""
    shape, sink = replace(SHAPE, tensor_every=0, token_every=0), Kept()
    files = scope_files(tmp_path)
    files.root.mkdir()
    events: list[Mapping[str, Any]] = []
    follower = Follower(files, publish=events.append, open_sinks=lambda: [sink])
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    writer.tick([(0, hello(shape, 0)), (0, schema(shape, 0))])
    for step in range(1, SPIKE):
        writer.tick([(0, frame) for frame in frames_of(shape, 0, step)])
    marked = {"beside": True, "perturbed": "pair noise: gaussian", "attempt": 1}
    writer.tick([(0, {**stats_frame(spiked(shape, SPIKE), 0, SPIKE), **marked})])
    follower.look()
    assert max(sink.numbers) == SPIKE - 1 and [each for each in events if each["k"] == "alert"] == []
    writer.tick([(0, {**frame, "attempt": 2}) for frame in frames_of(spiked(shape, SPIKE), 0, SPIKE)])
    follower.close()
    assert max(sink.numbers) == SPIKE and [each for each in events if each["k"] == "alert"] != []
    writer.close()
    with open_recording(tmp_path) as recording:
        assert recording.sampled(session=1) == (SPIKE,)


def test_without_a_spike_nothing_is_told(tmp_path: Path) -> None:
    """The negative control, over as many series."""
    events, _ = live_run(tmp_path, replace(SHAPE, steps=SPIKE - 1))
    assert [each for each in events if each["k"] == "alert"] == []


def test_a_resumed_run_tells_and_writes_nothing_of_before_again(tmp_path: Path) -> None:
    first, again = Kept(), Kept()
    live_run(tmp_path, SHAPE, open_sinks=lambda: [first])
    before = scope_files(tmp_path).alerts.read_text()
    second = replace(SHAPE, session="second", first_step=36, steps=10)
    events, said = live_run(tmp_path, second, open_sinks=lambda: [again])
    assert said == [] and first.calls and set(first.calls) == set(range(1, 41))
    assert set(again.calls) == set(range(36, 46))
    assert [each["step"] for each in events if each["k"] == "step"] == list(range(36, 46))
    assert {each["session"] for each in events if each["k"] == "step"} == {1}
    assert [each for each in events if each["k"] == "alert"] == []
    assert scope_files(tmp_path).alerts.read_text() == before
    with open_recording(tmp_path) as recording:
        assert {each.step for each in recording.alerts()} == {SPIKE}


def test_the_end_of_a_session_is_taken_before_the_next_one(tmp_path: Path) -> None:
    """Two starts between two looks: no step of the first is left out."""
    write_run(tmp_path, replace(SHAPE, steps=12), extras=False)
    write_run(tmp_path, replace(SHAPE, steps=5, first_step=9, session="second"), extras=False)
    events: list[Mapping[str, Any]] = []
    follower = Follower(scope_files(tmp_path), publish=events.append)
    follower.look()
    steps = [(each["session"], each["step"]) for each in events if each["k"] == "step"]
    assert steps == [(0, step) for step in range(1, 13)] + [(1, step) for step in range(9, 14)]
    follower.close()


def test_a_step_that_lacks_ranks_waits_and_is_then_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: now[0])
    shape = replace(SHAPE, tp=2, interval=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    writer.tick([(rank, hello(shape, rank)) for rank in (0, 1)])
    events: list[Mapping[str, Any]] = []
    follower = Follower(files, publish=events.append)
    writer.tick([(0, step_frame(shape, 0, 1))])
    follower.look()
    assert not events
    writer.tick([(1, step_frame(shape, 1, 1)), (0, step_frame(shape, 0, 2))])
    follower.look()
    assert [each["step"] for each in events] == [1]
    now[0] += follow.PATIENCE_SECONDS + 1
    follower.look()
    assert [each["step"] for each in events] == [1, 2]
    follower.close()
    writer.close()


@pytest.mark.parametrize("most", [1, 256])
def test_heads_of_one_map_are_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """With an entry for each tensor, each told once; of many tensors there are several."""
    monkeypatch.setattr(follow, "MOST_INDICES", most)
    shape = replace(SHAPE, steps=4, tensor_every=2, attention_tokens=32, attention_layers=1)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    writer.tick([(rank, hello(shape, rank)) for rank in range(shape.world_size)])
    events: list[Mapping[str, Any]] = []
    follower = Follower(files, publish=events.append)
    sent = set()
    for step in range(1, 5):
        frames = [
            (rank, frame)
            for rank in range(shape.world_size)
            for frame in frames_of(shape, rank, step)
            if frame["k"] == "tensor"
        ]
        writer.tick(frames)
        sent |= {
            (f["i"], f["path"], f["what"], f["microbatch"], json.dumps(f["index"], sort_keys=True))
            for _, f in frames
        }
        follower.look()
    follower.close()
    writer.close()
    told = [
        (each["step"], each["path"], each["what"], each["microbatch"], json.dumps(index, sort_keys=True))
        for each in events
        if each["k"] == "tensor"
        for index in each["indices"]
    ]
    assert sent and sorted(told) == sorted(sent)
    notices = [len(small(each)["indices"]) for each in events if each["k"] == "tensor"]
    assert sum(notices) == len(told) and max(notices) == min(most, 2)


def test_a_late_pipeline_stage_is_waited_for(tmp_path: Path) -> None:
    """One stage's values are written a tick before the other's: the sample is taken with both."""
    shape = replace(SHAPE, steps=8, interval=2, pp=2, layers=4, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    sink, events = Kept(), list[Mapping[str, Any]]()
    follower = Follower(files, publish=events.append, open_sinks=lambda: [sink])
    for rank in (0, 1):
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
    for step in range(1, 9):
        for rank in (0, 1):
            writer.tick([(rank, frame) for frame in frames_of(shape, rank, step)])
            follower.look()
    live = [each["step"] for each in events if each["k"] == "stats"]
    follower.close()
    writer.close()
    assert live == [2, 4, 6, 8], "from the second sample on nothing is waited for but the values"
    with open_recording(tmp_path) as recording:
        for step in (2, 4, 6, 8):
            named = {f"{each.statistic}/{each.path}" for each in recording.values(step)}
            assert "gradient_norm/decoder.layers.3" in named and named <= set(sink.numbers[step])


@pytest.mark.parametrize("behind", ["by a look", "at the start"])
def test_a_slow_node_raises_no_alert(behind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of sums, as one node of two has them, are not taken for the sums: neither where the other node
    writes a sample a look later from step 21 on, nor where it comes after the first ones."""
    now = [100.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: now[0])
    shape = replace(SHAPE, tp=2, nodes=2, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    events: list[Mapping[str, Any]] = []
    follower = Follower(files, publish=events.append)
    writers = [Writer(files.node("a", node), node=node, host="a", retain_bytes=1 << 26) for node in (0, 1)]
    first = 20 if behind == "at the start" else 1
    for step in range(1, 41):
        for rank, writer in enumerate(writers):
            if step == (1, first)[rank]:
                writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
            if step >= (1, first)[rank]:
                writer.tick([(rank, frame) for frame in frames_of(shape, rank, step)])
            if rank or step > 20 or step < first:
                follower.look()
        now[0] += 10.0 if step < first else 0.1
    follower.close()
    for writer in writers:
        writer.close()
    taken = [each for each in events if each["k"] == "stats"]
    assert [each["step"] for each in taken] == list(range(1, 41))
    assert [each["step"] for each in taken if any(row[3] for row in each["values"])] == list(range(1, first))
    # That nothing came of the other node's rank at first is news.
    alerts = [(each["kind"], each["step"]) for each in events if each["k"] == "alert"]
    assert alerts == ([("missing ranks", 2)] if behind == "at the start" else [])


def test_ranks_without_a_recording_delay_steps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two ranks sends nothing: each step waits for itself alone, not for those before it, too."""
    now = [100.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: now[0])
    shape = replace(SHAPE, tp=2, interval=2, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    for rank in (0, 1):
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
    events: list[Mapping[str, Any]] = []
    follower = Follower(files, publish=events.append)
    for step in range(1, 31):
        writer.tick([(0, frame) for frame in frames_of(shape, 0, step)])
        follower.look()
        now[0] += 1.0
    taken = [each["step"] for each in events if each["k"] == "step"]
    assert taken == list(range(1, taken[-1] + 1)) and taken[-1] >= 30 - follow.PATIENCE_SECONDS - 1
    sampled = [each["step"] for each in events if each["k"] == "stats"]
    assert sampled and sampled[-1] >= 30 - follow.PATIENCE_SECONDS - 6
    follower.close()
    writer.close()


@pytest.mark.parametrize("late", [True, False])
def test_the_last_step_of_another_node_is_waited_for(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies of a NaN on the second node: the first one's sidecar may end before that is written."""
    monkeypatch.setattr(follow, "OTHERS_SECONDS", 20.0 if late else 0.1)
    shape = replace(SHAPE, steps=5, layers=4, pp=2, nodes=2, nan_at=5, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writers = [Writer(files.node("a", node), node=node, host="a", retain_bytes=1 << 26) for node in (0, 1)]
    for rank, writer in enumerate(writers):
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
        for step in range(1, 6 - rank):
            writer.tick([(rank, frame) for frame in frames_of(shape, rank, step)])
    events: list[Mapping[str, Any]] = []
    follower = Follower(files, publish=events.append)
    follower.look()
    timer = threading.Timer(0.3, lambda: writers[1].tick([(1, each) for each in frames_of(shape, 1, 5)]))
    if late:
        timer.start()
    follower.close()
    found = [(each["path"], each["step"]) for each in events if each.get("kind") == "not finite"]
    if late:
        timer.join()
        assert ("decoder.layers.2.self_attention", 5) in found
    else:  # the other node is gone: what is there is taken
        assert [each["step"] for each in events if each["k"] == "step"] == [1, 2, 3, 4, 5]
    for writer in writers:
        writer.close()


def test_modules_are_read_once_and_again_when_a_rank_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several modules with NaN the first in execution order is named, on whichever rank it is."""
    shape = replace(SHAPE, layers=4, pp=2, nan_at=12)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    read: list[int] = []
    modules = Recording.modules

    def counted(recording: Recording, session: int | None = None) -> Any:
        found = modules(recording, session)
        read.append(len(found))
        return found

    monkeypatch.setattr(Recording, "modules", counted)
    events: list[Mapping[str, Any]] = []
    follower = Follower(files, publish=events.append)
    for step in range(1, 21):
        for rank in (0, 1):
            if step == (1, 6)[rank]:
                writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
        ranks = range(1 if step < 6 else 2)
        writer.tick([(rank, frame) for rank in ranks for frame in frames_of(shape, rank, step)])
        follower.look(final=True)
    follower.close()
    writer.close()
    assert len(read) == 2 and read[0] < read[1]
    (alert,) = [each for each in events if each.get("kind") == "not finite" and each["path"]]
    assert (alert["path"], alert["step"]) == ("decoder.layers.2.self_attention", 12)


def test_sinks_get_every_number_under_its_name(tmp_path: Path) -> None:
    sink = Kept()
    live_run(tmp_path, SHAPE, open_sinks=lambda: [sink])
    assert sink.closed
    with open_recording(tmp_path) as recording:
        steps = recording.steps()
        for index, step in enumerate(steps.step.tolist()):
            assert sink.numbers[step]["run/loss"] == steps.loss[index]
            values = recording.values(step)
            named = {f"{each.statistic}/{each.path or 'model'}": each.value for each in values}
            assert named and named.items() <= sink.numbers[step].items()
            run = set(sink.numbers[step]) - set(named)
            assert run == {f"run/{name}" for name in follow._COLUMNS}


def test_a_sink_that_fails_is_one_line_and_the_others_go_on(tmp_path: Path) -> None:
    bad, good = Kept("bad", fails_at=10), Kept("good")
    events, said = live_run(tmp_path, SHAPE, open_sinks=lambda: [bad, good])
    assert said == ["scope: nothing more goes to bad (ConnectionError: the server has gone)"]
    assert set(bad.calls) == set(range(1, 10)) and set(good.calls) == set(range(1, 41))
    assert len([each for each in events if each["k"] == "step"]) == 40


def test_numbers_that_are_not_finite_reach_sinks_as_they_are(tmp_path: Path) -> None:
    """A curve with a hole says less than one with NaN; of the run's own numbers unknown ones are left out."""
    sink = Kept()
    live_run(tmp_path, replace(SHAPE, layers=4, nan_at=35), open_sinks=lambda: [sink])
    assert math.isnan(sink.numbers[36]["activation_rms/decoder.layers.2"])
    assert "run/loss" not in sink.numbers[36] and "run/loss" in sink.numbers[34]


def test_a_sink_that_never_answers_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "CLOSE_SECONDS", 0.1)
    write_run(tmp_path, replace(SHAPE, steps=5), extras=False)
    answered = threading.Event()

    def opened() -> list[Kept]:
        answered.wait(20)
        return []

    said: list[str] = []
    follower = Follower(scope_files(tmp_path), open_sinks=opened, say=said.append)
    follower.start()
    follower.close()
    answered.set()
    (line,) = said
    assert "sinks lack them: a sink does not answer" in line


def test_a_stage_is_waited_for_after_a_sample_of_one_statistic(tmp_path: Path) -> None:
    """Between two samples of everything comes one of a single layer's moments."""
    shape = replace(SHAPE, interval=3, pp=2, layers=4, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    sink = Kept()
    follower = Follower(files, open_sinks=lambda: [sink])
    for rank in (0, 1):
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
    writer.tick([(0, {"k": "schema", "id": 2, "entries": [["decoder.layers.0", "weight_norm", 1]]})])
    for step in range(1, 10):
        for rank in (0, 1):
            if step in (4, 7) and rank == 0:
                single = {"k": "stats", "i": step, "id": 2, "attempt": 0, "values": np.array([1.0])}
                writer.tick([(0, single)])
            writer.tick([(rank, frame) for frame in frames_of(shape, rank, step)])
            follower.look()
    follower.close()
    writer.close()
    with open_recording(tmp_path) as recording:
        for step in (3, 6, 9):
            named = {f"{each.statistic}/{each.path}" for each in recording.values(step)}
            assert "gradient_norm/decoder.layers.3" in named and named <= set(sink.numbers[step])


def test_a_node_that_is_behind_at_a_rewind_raises_no_alert(tmp_path: Path) -> None:
    """Two attempts at step 31 are made before the second node has written step 30."""
    shape = replace(SHAPE, tp=2, nodes=2, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    events: list[Mapping[str, Any]] = []
    follower = Follower(files, publish=events.append)
    writers = [Writer(files.node("a", node), node=node, host="a", retain_bytes=1 << 26) for node in (0, 1)]
    past = [(step, 0) for step in range(1, 31)] + [(29, 1), (30, 1)] + [(step, 2) for step in range(29, 36)]

    def write(rank: int, step: int, attempt: int) -> None:
        frames = [{**frame, "attempt": attempt} for frame in frames_of(shape, rank, step)]
        writers[rank].tick([(rank, frame) for frame in frames])

    for rank, writer in enumerate(writers):
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
    behind = past[28:34]
    for step, attempt in past:
        for rank in (0, 1):
            if rank == 0 or (step, attempt) not in behind:
                write(rank, step, attempt)
            follower.look()
        if (step, attempt) == behind[-1]:
            for each in behind:
                write(1, *each)
            follower.look()
    follower.close()
    for writer in writers:
        writer.close()
    stats = [each for each in events if each["k"] == "stats"]
    assert [each["step"] for each in stats] == [step for step, _ in past]
    assert not [each for each in stats if any(row[3] for row in each["values"])]
    assert [each for each in events if each["k"] == "alert"] == []


def test_a_value_that_is_not_finite_is_told_without_its_other_parts(tmp_path: Path) -> None:
    shape = replace(SHAPE, tp=2, nodes=2, nan_at=20, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    sink, events = Kept(), list[Mapping[str, Any]]()
    follower = Follower(files, publish=events.append, open_sinks=lambda: [sink])
    writers = [Writer(files.node("a", node), node=node, host="a", retain_bytes=1 << 26) for node in (0, 1)]
    shape = replace(shape, layers=4)
    for step in range(21):
        for rank, writer in enumerate(writers):
            if step == 0:
                writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
            elif rank == 0 or step < 20:  # the second node dies before it writes the last step
                writer.tick([(rank, frame) for frame in frames_of(shape, rank, step)])
    for writer in writers:
        writer.close()
    follower.look(final=True)
    follower.close()
    found = [(each["path"], each["step"]) for each in events if each.get("kind") == "not finite"]
    assert ("decoder.layers.2", 20) in found
    assert "not_finite/decoder.layers.2" in sink.numbers[20]
    assert "gradient_norm/decoder.layers.1" in sink.numbers[19]
    assert "gradient_norm/decoder.layers.1" not in sink.numbers[20], "half a sum is no number for a sink"


def test_a_rewind_before_the_second_node_came_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: now[0])
    shape = replace(SHAPE, tp=2, nodes=2, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    sink = Kept()
    follower = Follower(files, open_sinks=lambda: [sink])
    writers = [Writer(files.node("a", node), node=node, host="a", retain_bytes=1 << 26) for node in (0, 1)]
    past = [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (4, 1)]
    for rank, writer in enumerate(writers):
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
        for step, attempt in past:
            frames = [{**frame, "attempt": attempt} for frame in frames_of(shape, rank, step)]
            writer.tick([(rank, frame) for frame in frames])
            if rank == 0:
                follower.look()
        if rank == 0:
            assert sink.calls == [], "nothing is taken of one node alone"
            now[0] += follow.PATIENCE_SECONDS / 2
    follower.look()
    follower.close()
    for writer in writers:
        writer.close()
    whole = {step for step, numbers in sink.numbers.items() if "gradient_norm/decoder.layers.1" in numbers}
    assert whole == {1, 2, 3, 4}
    assert Counter(sink.calls) == {1: 2, 2: 4, 3: 4, 4: 2}, "each step and each sample of both attempts once"


def test_a_file_that_cannot_be_read_ends_no_recording(tmp_path: Path) -> None:
    files = scope_files(tmp_path)
    files.root.mkdir()
    files.node("other", 0).mkdir()
    writer = Writer(files.node("own", 0), node=0, host="own", retain_bytes=1 << 26)
    said: list[str] = []
    assert taken_before(files, writer, said.append) == {}
    writer.close()
    assert len(said) == 1 and "may be told again" in said[0]


def test_node_0_on_another_host_takes_nothing_again(tmp_path: Path) -> None:
    """A scheduler starts the run again with other hosts: what the first start told is not told again."""
    shape = replace(SHAPE, steps=10, tensor_every=0, token_every=0)
    files = scope_files(tmp_path)
    files.root.mkdir()
    for host, session, texts in (("one", "first", ["a"]), ("two", "second", ["b"])):
        each = replace(shape, session=session, first_step=1 if host == "one" else 11)
        writer = Writer(files.node(host, 0), node=0, host=host, retain_bytes=1 << 26)
        before = taken_before(files, writer, lambda line: pytest.fail(line))
        assert before == ({} if host == "one" else {("first", 0): (10, 10)})
        sink = Kept()
        follower = Follower(files, before=before, open_sinks=lambda sink=sink: [sink])
        writer.requested(texts)
        writer.tick([(0, hello(each, 0)), (0, schema(each, 0))])
        for step in range(each.first_step, each.first_step + 10):
            writer.tick([(0, frame) for frame in frames_of(each, 0, step)])
        follower.close()
        writer.close()
        assert set(sink.numbers) == set(range(each.first_step, each.first_step + 10))
    with open_recording(tmp_path) as recording:
        assert [texts for _, texts in recording.requests()] == ['["a"]', '["b"]']
