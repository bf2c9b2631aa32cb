"""Sessions, rewinds, late and odd parts, and what ends a recording."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.scope.recording.combining import HOLD_SECONDS
from mt_megatron.scope.recording.files import keeps_shared_memory, scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.sql import query
from mt_megatron.scope.recording.writer import Alert, Writer
from mt_megatron.scope.report.compare import compare
from mt_megatron.scope.report.gather import gathered
from mt_megatron.scope.report.status import status_of
from tests.scope.synthetic import RunShape, frames_of, hello, schema, stats_frame, step_frame, write_run

SHAPE = RunShape(steps=20, tp=2, pp=1, tensor_every=0, token_every=0)


def a_writer(run: Path, said: list[str] | None = None, retain: int = 1 << 27) -> Writer:
    files = scope_files(run)
    files.root.mkdir(exist_ok=True)
    say = [].append if said is None else said.append
    return Writer(files.node("a", 0), node=0, host="a", retain_bytes=retain, say=say)


def greet(writer: Writer, shape: RunShape, *ranks: int) -> None:
    for rank in ranks:
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])


def counted(frames: Iterable[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """As ranks send them, which count how often the run has gone back."""
    return [{**each, "attempt": attempt} for each in frames]


def test_a_resumed_run_replaces_what_came_after(tmp_path: Path) -> None:
    """The second start goes on from step 25: of the first, steps up to 24 count; the rest stays readable."""
    first = RunShape(steps=40, interval=5, session="first")
    write_run(tmp_path, first, extras=False)
    again = RunShape(steps=10, first_step=25, interval=5, session="second", scale=2.0)
    write_run(tmp_path, again, extras=False)
    recording = open_recording(tmp_path)
    one, other = recording.sessions()
    assert (one.name, one.first_step, one.last_current) == ("first", 1, 24)
    assert (other.name, other.first_step, other.last_current) == ("second", 25, None)
    steps = recording.steps()
    assert steps.step.tolist() == list(range(1, 35))
    assert steps.session.tolist() == [0] * 24 + [1] * 10
    found = recording.series("decoder.layers.0", "activation_rms")
    assert found.step.tolist() == [5, 10, 15, 20, 25, 30] and found.session.tolist() == [0, 0, 0, 0, 1, 1]
    old = recording.series("decoder.layers.0", "activation_rms", session=0)
    assert old.step.tolist() == [5, 10, 15, 20, 25, 30, 35, 40]
    assert found.value[4] == pytest.approx(2 * old.value[4], rel=1e-9)
    assert recording.last_step() == 34
    assert recording.steps(session=0).step.tolist() == list(range(1, 41))


def test_a_rewind_within_a_session_is_another_attempt(tmp_path: Path) -> None:
    """Training goes back from step 20 to 12 without ending; parts of both attempts are never added up."""
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0, 1)
    for step, attempt in [(step, 0) for step in range(1, 21)] + [(step, 1) for step in range(12, 18)]:
        for rank in (0, 1):
            writer.tick([(rank, frame) for frame in counted(frames_of(SHAPE, rank, step), attempt)])
    for step in (5, 15):
        alert = Alert(
            step=step, kind="band", path="", statistic="loss", value=9.0, low=1.0, high=2.0, text="high"
        )
        writer.alert(alert, (SHAPE.session, 0))
    writer.close()
    recording = open_recording(tmp_path)
    assert [(each.attempt, each.first_step) for each in recording.sessions()] == [(0, 1), (1, 12)]
    assert recording.steps().step.tolist() == list(range(1, 18))
    assert recording.steps(session=0).step.tolist() == list(range(1, 21))
    found = recording.series("decoder.layers.0", "gradient_norm")
    assert found.step.tolist() == [10] and found.parts.tolist() == [2]
    assert [each.step for each in recording.alerts()] == [5, 15]
    assert [each.step for each in recording.alerts(current=True)] == [5], "the run went back before step 15"
    assert [each.step for each in gathered(recording).alerts] == [5]
    twice = recording.series("decoder.layers.0", "gradient_norm", session=0)
    assert twice.step.tolist() == [10, 20] and twice.parts.tolist() == [2, 2]


def test_an_undo_is_known_before_the_next_step(tmp_path: Path) -> None:
    """The run goes back to step 4 and makes no further one: in a pause, or at its end."""
    shape = RunShape(steps=8, interval=2, tp=2, pp=1, tensor_every=0, token_every=0, perturbed=(5, 8))
    writer = a_writer(tmp_path)
    greet(writer, shape, 0, 1)
    for step in range(1, 9):
        writer.tick([(rank, frame) for rank in (0, 1) for frame in frames_of(shape, rank, step)])
    for step in (3, 7):
        alert = Alert(
            step=step, kind="band", path="", statistic="loss", value=9.0, low=1.0, high=2.0, text="high"
        )
        writer.alert(alert, (shape.session, 0))
    for rank in (0, 1):
        writer.tick([(rank, {"k": "back", "first": 5, "attempt": 1}), (rank, {"k": "bye"})])
    with open_recording(tmp_path) as recording:
        assert [(each.attempt, each.first_step) for each in recording.sessions()] == [(0, 1), (1, 5)]
        assert recording.last_step() == 4 and recording.steps().step.tolist() == [1, 2, 3, 4]
        assert recording.sampled() == (2, 4) and recording.perturbed() == ()
        status = status_of(recording)
        assert (status.step, status.ended, status.ranks, status.perturbed) == (4, 2, 2, 0)
        assert [each.step for each in status.alerts] == [3]
        data = gathered(recording)
        assert data.steps.step.tolist() == [1, 2, 3, 4] and [each.step for each in data.alerts] == [3]
        assert compare(recording, recording).steps == 4
        rows = query(recording, "select step from steps where current order by step").rows
        assert rows == [(1,), (2,), (3,), (4,)]
        assert len(recording.modules()) == len(recording.modules(0)) > 0
    for rank in (0, 1):
        writer.tick([(rank, {**step_frame(shape, rank, 5), "attempt": 1})])
    writer.close()
    with open_recording(tmp_path) as recording:
        assert recording.steps().session.tolist() == [0, 0, 0, 0, 1]


def test_frames_without_their_attempt_or_of_an_earlier_one_are_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    writer = a_writer(tmp_path, said)
    greet(writer, SHAPE, 0)
    without = {key: value for key, value in step_frame(SHAPE, 0, 1).items() if key != "attempt"}
    sent = [without, *counted([step_frame(SHAPE, 0, 2)], 1), *counted([step_frame(SHAPE, 0, 3)], 0)]
    writer.tick([(0, frame) for frame in sent])
    writer.close()
    assert writer.refused == {0: (2, 0)} and not writer.lost
    assert "a step frame's attempt: found None" in said[0]
    assert "found attempt 0 of a rank that is in attempt 1" in said[1]
    assert open_recording(tmp_path).steps().step.tolist() == [2]


def test_a_rank_that_connects_again_goes_on(tmp_path: Path) -> None:
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0, 1)
    for step in range(1, 21):
        if step == 11:
            greet(writer, SHAPE, 0)
        writer.tick([(rank, frame) for rank in (0, 1) for frame in frames_of(SHAPE, rank, step)])
    writer.close()
    recording = open_recording(tmp_path)
    assert len(recording.sessions()) == 1 and recording.steps().step.tolist() == list(range(1, 21))
    assert not recording.series("decoder.layers.0", "gradient_norm").partial.any()


def test_a_sidecar_that_was_killed_and_started_again_goes_on(tmp_path: Path) -> None:
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0, 1)
    writer.tick([(rank, frame) for rank in (0, 1) for frame in frames_of(SHAPE, rank, 10)])
    del writer  # no close: what the process had not written is lost, the file stays
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0, 1)
    writer.tick([(rank, frame) for rank in (0, 1) for frame in frames_of(SHAPE, rank, 20)])
    writer.close()
    recording = open_recording(tmp_path)
    assert len(recording.sessions()) == 1
    assert recording.series("decoder.layers.0", "gradient_norm").parts.tolist() == [2, 2]


def test_late_parts_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("mt_megatron.scope.recording.writer.time.monotonic", lambda: now[0])
    shape = RunShape(steps=20, tp=2, pp=1, experts=8, tensor_every=0)
    writer = a_writer(tmp_path)
    greet(writer, shape, 0, 1)
    writer.tick([(0, stats_frame(shape, 0, 10))])
    reader = open_recording(tmp_path)
    assert not len(reader.series("decoder.layers.0", "gradient_norm").step), "held for the other rank"
    now[0] += HOLD_SECONDS + 0.1
    writer.tick([])
    assert reader.series("decoder.layers.0", "gradient_norm").partial.tolist() == [True]
    writer.tick([(1, stats_frame(shape, 1, 10))])
    now[0] += HOLD_SECONDS + 0.1
    writer.tick([])
    from tests.scope.synthetic import truth_of

    truth = truth_of(shape)
    for (path, name), values in truth.values.items():
        found = reader.series(path, name, vectors=True)
        assert found.partial.tolist() == [False], (path, name)
        assert found.value[0] == pytest.approx(values[10], rel=1e-12)
        if (path, name) in truth.vectors:
            np.testing.assert_allclose(found.vector, [truth.vectors[path, name][10]], rtol=1e-12)
    writer.close()


def test_odd_entries_are_left_out_and_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    writer = a_writer(tmp_path, said)
    shape = RunShape(tp=2, pp=1)
    entries: list[list[Any]] = [
        ["a", "activation_rms", 2],
        ["a", "from_the_future", 3],
        ["a", "expert_load", 4],
    ]
    for rank in (0, 1):
        own = [*entries[:2], ["a", "expert_load", 4 + rank]]
        writer.tick([(rank, hello(shape, rank)), (rank, {"k": "schema", "id": 1, "entries": own})])
    for step in (10, 20):
        for rank in (0, 1):
            values = np.arange(9.0 + rank)
            writer.tick([(rank, {"k": "stats", "i": step, "id": 1, "attempt": 0, "values": values})])
    for wrong in (1, 9):
        values = np.arange(4.0)
        writer.tick([(0, {"k": "stats", "i": 30, "id": wrong, "attempt": 0, "values": values})])
    writer.close()
    recording = open_recording(tmp_path)
    assert recording.series("a", "activation_rms").parts.tolist() == [2, 2]
    assert recording.series("a", "expert_load").of.tolist() == [1, 1]
    assert {name.statistic for name in recording.names()} >= {"activation_rms", "expert_load"}
    text = "\n".join(said)
    assert text.count("from_the_future") == 2  # once a rank
    assert text.count("elements, other ranks 4") == 1
    assert "found 4 values of a schema of 9" in text and "schema 9, which the rank has not sent" in text


def test_a_full_disk_ends_the_recording_with_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    writer = a_writer(tmp_path, said)
    greet(writer, SHAPE, 0, 1)
    writer.tick([(0, step_frame(SHAPE, 0, 1))])
    pages = writer._connection.execute("PRAGMA page_count").fetchone()[0]
    writer._connection.execute(f"PRAGMA max_page_count={pages + 4}")
    shape = RunShape(tp=2, pp=1, tensor_every=1)
    for step in range(2, 30):
        writer.tick([(0, frame) for frame in frames_of(shape, 0, step)])
    writer.close()
    assert len(said) == 1 and "the disk is full" in said[0] and "training goes on" in said[0]
    assert writer.lost[0][0] > 20 and writer.stopped == "the disk is full"
    # What was there before is still whole.
    assert open_recording(tmp_path).steps().step.tolist()[0] == 1


def test_frames_before_hello_and_of_no_kind_are_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    writer = a_writer(tmp_path, said)
    writer.tick([(3, step_frame(SHAPE, 1, 1)), (3, {"k": "nonsense"}), (3, {"k": "hello"})])
    assert writer.refused == {3: (3, 0)} and len(said) == 3
    greet(writer, SHAPE, 0)
    writer.tick([(0, {**step_frame(SHAPE, 0, 1), "perturbed": "noise"}), (0, step_frame(SHAPE, 0, 2))])
    writer.close()
    recording = open_recording(tmp_path)
    assert recording.perturbed() == ((1, "noise"),)
    assert recording.steps().perturbed.tolist() == [True, False]


@pytest.mark.parametrize("sampled", [True, False])
def test_a_pair_beside_the_run_leaves_the_step_itself_unmarked(tmp_path: Path, sampled: bool) -> None:
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0)
    attempt = 0
    for step in (1, 2, 3):
        if step == 2:
            for attempt, text in enumerate(("pair noise: baseline", "pair noise: gaussian"), 1):
                frame = {**stats_frame(SHAPE, 0, step), "beside": True, "perturbed": text}
                writer.tick([(0, {**frame, "attempt": attempt})])
            with open_recording(tmp_path) as recording:
                assert recording.last_step() == 1 and recording.sampled() == (1,) * sampled
            attempt += 1
        writer.tick([(0, {**step_frame(SHAPE, 0, step), "attempt": attempt})])
        if sampled:
            writer.tick([(0, {**stats_frame(SHAPE, 0, step), "attempt": attempt})])
    writer.close()
    recording = open_recording(tmp_path)
    assert recording.perturbed() == ()
    steps = recording.steps()
    assert steps.step.tolist() == [1, 2, 3] and not steps.perturbed.any()
    assert len(set(steps.session[1:].tolist())) == 1
    found = recording.series("decoder.layers.0", "activation_rms")
    assert found.step.tolist() == ([1, 2, 3] if sampled else []) and not found.perturbed.any()
    marked = {text for each in recording.sessions() for _, text in recording.perturbed(each.number)}
    assert marked == {"pair noise: baseline", "pair noise: gaussian"}


def test_the_file_is_private_and_has_a_log_only_while_it_is_written(tmp_path: Path) -> None:
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0)
    path = scope_files(tmp_path).nodes()[0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert Path(f"{path}-wal").stat().st_mode & 0o077 == 0
    writer.close()
    assert not Path(f"{path}-wal").exists()


def test_network_file_systems_get_a_journal_that_their_locks_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keeps_shared_memory(tmp_path)
    monkeypatch.setattr("mt_megatron.scope.recording.schema.keeps_shared_memory", lambda _: False)
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0, 1)
    path = scope_files(tmp_path).nodes()[0]
    assert writer._connection.execute("PRAGMA journal_mode").fetchone()[0] == "truncate"
    recording = open_recording(tmp_path)
    for step in range(1, 21):
        writer.tick([(rank, frame) for rank in (0, 1) for frame in frames_of(SHAPE, rank, step)])
        assert recording.last_step() == step
    assert not Path(f"{path}-wal").exists()
    writer.close()


def test_ranks_stay_in_one_attempt_whatever_is_late_or_dropped(tmp_path: Path) -> None:
    """The run goes back twice. Rank 1 connects when rank 0's second attempt is written already, and the
    frames by which its own rewinds could be told are dropped."""
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0)
    past = [(step, 0) for step in (1, 2, 3, 4)] + [(step, 1) for step in (3, 4, 5)]
    past += [(step, 2) for step in (4, 5, 6, 7)]
    dropped = {(3, 1), (4, 1), (4, 2), (5, 2)}
    for rank in (0, 1):
        if rank:
            greet(writer, SHAPE, rank)
        for step, attempt in past:
            if not (rank and (step, attempt) in dropped):
                frames = counted(frames_of(SHAPE, rank, step), attempt)
                writer.tick([(rank, frame) for frame in frames])
    writer.close()
    recording = open_recording(tmp_path)
    assert [(each.attempt, each.first_step, each.missing_ranks) for each in recording.sessions()] == [
        (0, 1, 0),
        (1, 3, 0),
        (2, 4, 0),
    ]
    steps = recording.steps()
    assert steps.step.tolist() == list(range(1, 8))
    assert steps.session.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert steps.ranks.tolist() == [2, 2, 1, 1, 1, 2, 2]


def test_what_is_derived_of_a_late_rank_counts_it(tmp_path: Path) -> None:
    """A rank whose schema comes after the first values of another one is expected in what is made of them."""
    shape = RunShape(steps=20, tp=1, pp=1, dp=2, experts=8, tensor_every=0, token_every=0)
    writer = a_writer(tmp_path)
    greet(writer, shape, 0)
    writer.tick([(0, stats_frame(shape, 0, 10))])
    greet(writer, shape, 1)
    writer.tick([(1, stats_frame(shape, 1, 10))])
    writer.tick([(0, stats_frame(shape, 0, 20))])
    writer.close()
    recording = open_recording(tmp_path)
    for name in ("expert_load", "dead_experts", "overloaded_experts"):
        found = recording.series("decoder.layers.1.mlp.router", name)
        assert found.step.tolist() == [10, 20] and found.of.tolist() == [2, 2], name
        assert found.parts.tolist() == [2, 1] and found.partial.tolist() == [False, True], name
        assert found.only_whole().step.tolist() == [10]


def test_a_part_that_completes_a_value_is_written_at_once(tmp_path: Path) -> None:
    """The first rank's part was written when nobody knew of the second: that one's makes the value whole."""
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0)
    writer.tick([(0, stats_frame(SHAPE, 0, 10))])
    writer.tick([(1, hello(SHAPE, 1)), (1, schema(SHAPE, 1)), (1, stats_frame(SHAPE, 1, 10))])
    with open_recording(tmp_path) as recording:  # within ``HOLD_SECONDS``
        values = recording.values(10)
        assert values and all(each.parts == each.of == 2 and not each.partial for each in values)
    writer.close()


def test_attempts_are_in_order_however_they_are_written(tmp_path: Path) -> None:
    """Rank 1 enters the third attempt before rank 0's second one is written: frames of it were dropped. What
    rank 1 sent of tensors without any other frame of the attempt is of that one, too."""
    shape = RunShape(steps=20, tp=2, pp=1, tensor_every=4, token_every=0)
    writer = a_writer(tmp_path)
    greet(writer, shape, 0, 1)
    for step in (1, 2, 3):
        for rank in (0, 1):
            writer.tick([(rank, frame) for frame in counted(frames_of(shape, rank, step), 0)])
    tensors = [frame for frame in frames_of(shape, 1, 4) if frame["k"] == "tensor"]
    assert tensors
    writer.tick([(1, frame) for frame in counted(tensors, 2)])
    writer.tick([(1, frame) for frame in counted(frames_of(shape, 1, 5), 2)])
    for step, attempt in ((4, 1), (4, 2), (5, 2)):
        writer.tick([(0, frame) for frame in counted(frames_of(shape, 0, step), attempt)])
    writer.close()
    recording = open_recording(tmp_path)
    assert [each.attempt for each in recording.sessions()] == [0, 1, 2]
    assert recording.steps().step.tolist() == [1, 2, 3, 4, 5]
    assert recording.steps().session.tolist() == [0, 0, 0, 2, 2]
    parts = {key.session: recording.tensor(key).missing for key in recording.tensors(session=1)}
    assert set(parts.values()) == {0.5}
    parts = {key.session: recording.tensor(key).missing for key in recording.tensors(session=2)}
    assert parts == {2: 0.0}


def test_attempts_of_a_start_share_their_list_of_modules(tmp_path: Path) -> None:
    """Hundreds of pairs would fill the file with it; a file whose attempts have lists of their own is read as
    before."""
    writer = a_writer(tmp_path)
    greet(writer, SHAPE, 0, 1)
    for attempt in range(1, 7):
        for rank in (0, 1):
            frame = {**stats_frame(SHAPE, rank, attempt), "beside": True, "attempt": attempt}
            writer.tick([(rank, frame)])
    listed = "SELECT session, count(*) FROM module GROUP BY session"
    assert len(writer._execute(listed).fetchall()) == 1
    with open_recording(tmp_path) as recording:
        expected = recording.modules(0)
        assert expected and all(each.ranks == (0, 1) for each in expected)
        assert all(recording.modules(session) == expected for session in range(7))
        writer._execute("INSERT INTO module SELECT 3, rank, position, path, 'Later', 0 FROM module")
        assert {each.class_name for each in recording.modules(2)} == {"Later"}
        assert {each.class_name for each in recording.modules(4)} == {"Later"}
        assert recording.modules(1) == expected
    writer.close()


def test_attempts_of_a_start_share_what_is_declared(tmp_path: Path) -> None:
    """Both ranks are asked for more in the third attempt, and one of them is missing from the fourth. A file
    whose attempts have all rows of their own, as older ones do, says the same."""
    shape = RunShape(steps=20, tp=2, pp=1, experts=8, tensor_every=0, token_every=0)
    writer = a_writer(tmp_path)
    greet(writer, shape, 0, 1)
    more = {"k": "schema", "id": 2, "entries": [["a", "expert_load", 4], ["a", "activation_rms", 2]]}
    for attempt in range(4):
        for rank in (0, 1)[: 2 - attempt // 3]:
            frame = {**stats_frame(shape, rank, 10 + attempt), "attempt": attempt}
            if attempt == 2:
                writer.tick([(rank, more)])
            writer.tick([(rank, frame)])
            if attempt > 1:
                frame = {**frame, "i": 20 + attempt, "id": 2, "values": np.ones(6)}
                writer.tick([(rank, frame)])
    writer.tick([], final=True)

    def answers() -> list[Any]:
        with open_recording(tmp_path) as recording:
            found: list[Any] = [
                (name.path, name.statistic, session, series.step.tolist(), series.of.tolist())
                for name in recording.names()
                for session in range(4)
                for series in (recording.series(name.path, name.statistic, session=session),)
            ]
            found += [
                (each.path, each.statistic, step, each.parts, each.of, each.partial)
                for step in (10, 11, 12, 13, 22, 23)
                for each in recording.values(step, session=step % 10)
            ]
            columns = "session, step, path, statistic, parts, of, partial"
            found += query(recording, f"select {columns} from stats order by 1, 2, 3, 4").rows
            found += query(
                recording, "select session, step, path, statistic from vectors order by 1, 2, 3"
            ).rows
            return found

    execute = writer._connection.execute
    once = execute("SELECT count(*), count(DISTINCT entry || ' ' || rank) FROM declared").fetchone()
    assert once[0] == once[1]
    found = answers()
    assert ("a", "dead_experts", 2, [22], [2]) in found and ("a", "dead_experts", 3, [23], [1]) in found
    assert not any(row[0] == "a" and row[2] < 2 and row[3] for row in found if len(row) == 5)
    execute("UPDATE about SET value=100 WHERE key='declared_once'")
    execute(
        "INSERT OR IGNORE INTO declared SELECT s.id, d.entry, d.rank, d.length FROM declared AS d "
        "JOIN session AS s ON s.id > d.session JOIN rank AS r ON r.session = s.id AND r.rank = d.rank"
    )
    assert answers() == found
    writer.close()
