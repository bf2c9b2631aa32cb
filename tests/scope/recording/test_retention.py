"""The bound of a node's file: its size, what goes first, what stays, and that all of it is counted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.recording.retention import FULL, LEAST_BYTES, thinned
from mt_megatron.scope.recording.schema import connect_reader
from mt_megatron.scope.recording.writer import Writer
from tests.scope.synthetic import RunShape, hello, step_frame

SHAPE = RunShape(tp=1, pp=1)
MIB = 2**20


def a_writer(run: Path, retain: int, said: list[str]) -> Writer:
    files = scope_files(run)
    files.root.mkdir(exist_ok=True)
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=retain, say=said.append)
    entries = [["a", "activation_rms", 2], ["a", "histogram", 64]]
    writer.tick([(0, hello(SHAPE, 0)), (0, {"k": "schema", "id": 1, "entries": entries})])
    return writer


def stats(step: int) -> dict[str, Any]:
    values = np.concatenate([[step**2, 1.0], np.full(64, float(step))])
    return {"k": "stats", "i": step, "id": 1, "attempt": 0, "values": values}


def tensor(step: int, size: int, layer: int = 0) -> dict[str, Any]:
    data = np.random.default_rng(step).standard_normal((size // 256, 64)).astype(np.float32)
    return {
        "k": "tensor",
        "i": step,
        "attempt": 0,
        "path": f"decoder.layers.{layer}",
        "what": "activation",
        "index": {},
        "shape": list(data.shape),
        "offset": [0, 0],
        "encoding": "f32",
        "data": data,
    }


def size_of(run: Path) -> int:
    return sum(path.stat().st_size for path in scope_files(run).nodes())


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Recording, int]]:
    """400 steps, each with a tensor of 64 KiB, a vector and a scalar, in 4 MiB; the largest file then."""
    run = tmp_path_factory.mktemp("long")
    said: list[str] = []
    writer = a_writer(run, 4 * MIB, said)
    largest = 0
    for step in range(1, 401):
        writer.tick([(0, stats(step)), (0, tensor(step, 64 << 10)), (0, step_frame(SHAPE, 0, step))])
        if step % 20 == 0:
            largest = max(largest, size_of(run))
    writer.close()
    assert not said and not writer.lost
    recording = open_recording(run)
    yield recording, max(largest, size_of(run))
    recording.close()


def test_the_file_stays_at_its_bound(long_run: tuple[Recording, int]) -> None:
    """400 tensors of 64 KiB are 25 MiB."""
    assert MIB < long_run[1] <= 4 * MIB


def test_old_tensors_go_first_and_scalars_stay(long_run: tuple[Recording, int]) -> None:
    recording, _ = long_run
    kept = [key.step for key in recording.tensors()]
    assert 10 < len(kept) < 60 and kept[-2:] == [399, 400]
    found = recording.series("a", "activation_rms")
    assert found.step.tolist() == list(range(1, 401))
    np.testing.assert_allclose(found.value, np.arange(1, 401))
    vectors = recording.series("a", "histogram", vectors=True)
    assert vectors.vector is not None and np.isfinite(vectors.vector).all()
    assert len(recording.steps().step) == 400
    assert {each.kind for each in recording.thinned()} == {"tensors"}


def test_density_falls_with_age(long_run: tuple[Recording, int]) -> None:
    """No stretch of the run is without tensors, and the newer half has more of them."""
    steps = np.asarray([key.step for key in long_run[0].tensors()])
    assert steps[0] <= 150
    assert (steps > 200).sum() > (steps <= 200).sum() > 0


@pytest.mark.parametrize("reader", [None, "idle", "within a statement"])
def test_file_and_log_together_stay_at_the_bound(
    tmp_path: Path, reader: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 steps of 100 series and 1 MiB of tensors; a reader comes at step 40 and leaves at step 80. What
    waits for it is written then, and the newest steps are whole."""
    monkeypatch.setattr("mt_megatron.scope.recording.retention.WRITER_SECONDS", 0.01)
    monkeypatch.setattr("mt_megatron.scope.recording.writer.PAUSE_SECONDS", 0.0)
    said: list[str] = []
    writer = a_writer(tmp_path, 16 * MIB, said)
    entries = [[f"decoder.layers.{layer}", "activation_rms", 2] for layer in range(100)]
    writer.tick([(0, {"k": "schema", "id": 2, "entries": entries})])
    with contextlib.ExitStack() as stack:
        peak = stack.enter_context(peak_of(tmp_path))
        for step in range(1, 121):
            if step == 40 and reader is not None:
                connection = connect_reader(scope_files(tmp_path).nodes()[0])
                connection.execute("BEGIN")
                connection.execute("SELECT count(*) FROM value").fetchone()
                if reader == "idle":
                    connection.execute("COMMIT")
            if step == 80 and reader is not None:
                connection.close()
            values = np.tile([step**2, 1.0], 100)
            frames = [{"k": "stats", "i": step, "id": 2, "attempt": 0, "values": values}]
            frames += [tensor(step, 512 << 10, layer) for layer in range(2)]
            writer.tick([(0, frame) for frame in [*frames, step_frame(SHAPE, 0, step)]])
            assert all_bytes(tmp_path) <= 16 * MIB
        writer.close()
    assert peak[0] <= 16 * MIB
    waits = reader == "within a statement"
    assert len(said) == waits and (not waits or "frames wait" in said[0])
    with open_recording(tmp_path) as recording:
        assert recording.series("decoder.layers.99", "activation_rms").step.tolist() == list(range(1, 121))
        kept = {key.step for key in recording.tensors()}
        assert kept >= {119, 120} and writer.lost.keys() <= {0} and writer.stopped is None


def all_bytes(run: Path) -> int:
    """Of the file, its log and the log's index."""
    found = 0
    for path in scope_files(run).root.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


@contextlib.contextmanager
def peak_of(run: Path) -> Iterator[list[int]]:
    """Largest size at any time, looked at all the time."""
    peak, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            peak[0] = max(peak[0], all_bytes(run))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def test_what_went_is_counted(long_run: tuple[Recording, int]) -> None:
    recording, _ = long_run
    gone = sum(each.steps for each in recording.thinned())
    assert gone + len(recording.tensors()) == 400
    assert all(1 <= each.first_step <= each.last_step <= 400 for each in recording.thinned())


def test_vectors_go_before_scalars(tmp_path: Path) -> None:
    """Without tensors: vectors of 32 KiB are thinned, the numbers that were made of them stay exact."""
    said: list[str] = []
    writer = a_writer(tmp_path, LEAST_BYTES, said)
    writer.tick([(0, {"k": "schema", "id": 2, "entries": [["b", "expert_load", 4096]]})])
    for step in range(1, 151):
        values = np.ones(4096)
        values[0] += step
        writer.tick([(0, {"k": "stats", "i": step, "id": 2, "attempt": 0, "values": values})])
    writer.close()
    with open_recording(tmp_path) as recording:
        found = recording.series("b", "expert_load", vectors=True)
        assert found.step.tolist() == list(range(1, 151))
        step = np.arange(1, 151)
        np.testing.assert_allclose(found.value, (1 + step) * 4096 / (4096 + step))
        assert found.vector is not None
        there = np.isfinite(found.vector[:, 0])
        assert there[-32:].all() and 32 <= there.sum() < 100
        assert {each.kind for each in recording.thinned()} == {"vectors"}
    assert size_of(tmp_path) <= LEAST_BYTES and not said


def test_one_step_above_the_bound_keeps_the_newest_of_its_tensors(tmp_path: Path) -> None:
    writer = a_writer(tmp_path, LEAST_BYTES, [])
    writer.tick([(0, step_frame(SHAPE, 0, 1)), *((0, tensor(1, 256 << 10, layer)) for layer in range(12))])
    writer.close()
    assert size_of(tmp_path) <= LEAST_BYTES  # what went is given back to the disk
    with open_recording(tmp_path) as recording:
        layers = sorted(int(key.path.rpartition(".")[2]) for key in recording.tensors())
        assert layers and layers == list(range(12 - len(layers), 12))
        noted = {(each.kind, each.first_step, each.last_step) for each in recording.thinned()}
        assert noted == {("tensors", 1, 1)}


def test_a_bound_of_nothing_but_scalars_refuses_tensors_and_counts_them(tmp_path: Path) -> None:
    """What is never removed fills the file: a line says so once, and each refused frame is counted."""
    said: list[str] = []
    writer = a_writer(tmp_path, LEAST_BYTES, said)
    modules = [[f"m{index}." + "x" * 480, "Linear", 1] for index in range(2600)]
    writer.tick([(0, {**hello(SHAPE, 0), "modules": modules})])
    for step in range(1, 4):
        writer.tick([(0, tensor(step, 64 << 10))])
    assert sum("reached its bound" in line for line in said) == 1 and "--scope-retain-mib" in said[0]
    frames, size = writer.lost[0]
    assert 2 <= frames <= 3 and size == frames * (64 << 10)
    writer.tick([(0, step_frame(SHAPE, 0, 1))])
    writer.close()
    assert writer.stopped is None
    with open_recording(tmp_path) as recording:
        assert recording.steps().step.tolist() == [1]


def test_thinning_takes_every_second_of_the_older_half() -> None:
    steps = [(1, step) for step in range(100)]
    assert thinned(steps, keep=2) == [(1, step) for step in range(1, 50, 2)]
    assert thinned(steps[:3], keep=2) == [(1, 0)]
    assert thinned(steps[:2], keep=2) == []
    assert 0 < FULL < 1


def test_lists_of_attempts_that_have_nothing_left_go(tmp_path: Path) -> None:
    """Of the modules' list the first attempt's stays, as that of later ones."""
    said: list[str] = []
    writer = a_writer(tmp_path, LEAST_BYTES, said)
    for attempt in range(1, 41):
        writer.tick([(0, {"k": "back", "first": attempt, "attempt": attempt})])
    frame = {**stats(60), "attempt": 40}
    writer.tick([(0, {**step_frame(SHAPE, 0, 60), "attempt": 40}), (0, frame)])
    execute = writer._connection.execute
    execute("INSERT INTO module SELECT 20, rank, position, path, class, parameters FROM module")
    # As before attempts shared what is declared, too.
    execute("UPDATE about SET value=100 WHERE key='declared_once'")
    execute("INSERT INTO declared SELECT id, entry, rank, length FROM declared, session WHERE id > 1")
    with open_recording(tmp_path) as recording:
        before = recording.modules()
        writer._retention._remove_unused()
        assert before == recording.modules() == recording.modules(25)
        assert recording.series("a", "activation_rms").of.tolist() == [1]
    assert execute("SELECT DISTINCT session FROM module").fetchall() == [(1,)]
    kept = [row[0] for row in execute("SELECT DISTINCT session FROM declared ORDER BY 1")]
    assert kept == list(range(34, 42))
    writer.close()
