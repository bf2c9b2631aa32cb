"""What a recording gives equals what was sent, by arithmetic that is not the package's."""

from __future__ import annotations

import json
import math
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from mt_megatron.errors import ScopeError
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.recording.sql import query
from mt_megatron.scope.recording.writer import Writer
from mt_megatron.scope.report.gather import gathered
from tests.scope.synthetic import (
    RunShape,
    Truth,
    frames_of,
    hello,
    loss_of,
    schema,
    stats_frame,
    truth_of,
    write_run,
)

SHAPES = {
    "one node": RunShape(steps=60, experts=8),
    "two nodes, a stage each": RunShape(steps=40, nodes=2, experts=8),
    "two nodes, replicas apart": RunShape(steps=40, nodes=2, tp=1, pp=1, dp=2, experts=8),
    "one rank": RunShape(steps=40, tp=1, pp=1, nodes=1),
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recording, Truth]:
    run = tmp_path_factory.mktemp("run")
    truth = write_run(run, request.param)
    return open_recording(run), truth


def test_series_equal_the_truth(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    assert {(name.path, name.statistic) for name in recording.names()} == set(truth.values)
    for (path, name), values in truth.values.items():
        found = recording.series(path, name, vectors=True)
        assert found.step.tolist() == sorted(values)
        np.testing.assert_allclose(found.value, [values[step] for step in sorted(values)], rtol=1e-12)
        assert not found.partial.any() and (found.parts == found.of).all()
        if (path, name) in truth.vectors:
            vectors = truth.vectors[path, name]
            assert found.vector is not None
            np.testing.assert_allclose(found.vector, [vectors[step] for step in sorted(vectors)], rtol=1e-12)


def test_values_of_a_step_equal_the_series(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    step = recording.sampled()[-1]
    found = {(each.path, each.statistic): each for each in recording.values(step, vectors=True)}
    assert set(found) == set(truth.values)
    for key, each in found.items():
        assert each.value == pytest.approx(truth.values[key][step], rel=1e-12)
        assert each.parts == each.of and not each.partial
        if key in truth.vectors:
            np.testing.assert_allclose(each.vector, truth.vectors[key][step], rtol=1e-12)
    only = recording.values(step, statistics=["activation_rms"])
    assert {each.statistic for each in only} == {"activation_rms"} and len(only) > 1


def test_steps_equal_the_truth(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    steps = recording.steps()
    assert steps.step.tolist() == sorted(truth.loss)
    np.testing.assert_array_equal(steps.loss, [truth.loss[step] for step in sorted(truth.loss)])
    world = truth.shape.world_size
    assert (steps.memory_bytes == (6 << 30) + (world - 1) * (1 << 20)).all()
    assert (steps.ranks == world).all() and recording.last_step() == max(truth.loss)
    assert recording.steps(5, 9).step.tolist() == [5, 6, 7, 8, 9]
    assert [each.rank for each in recording.rank_steps(7)] == list(range(world))


def test_tensors_equal_the_truth_within_their_stated_error(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    keys = recording.tensors()
    named = {(key.step, key.path, key.what, json.dumps(dict(key.index), sort_keys=True)): key for key in keys}
    assert set(named) == set(truth.tensors)
    for name, key in named.items():
        found, whole = recording.tensor(key), truth.tensors[name]
        assert found.missing == 0 and found.values.shape == whole.shape
        assert np.abs(found.values - whole).max() <= found.error * (1 + 1e-5) + 1e-7
        assert (found.error == 0) == (found.encodings == ("f32",))
        window = recording.tensor(key, (10, 20, 3, 30))
        np.testing.assert_array_equal(window.values, found.values[10:30, 3:33])


def test_tokens_equal_the_truth(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    assert recording.token_steps() == tuple(sorted({step for step, _ in truth.tokens}))
    for (step, sample), arrays in truth.tokens.items():
        (found,) = [each for each in recording.tokens(step) if each.sample == sample]
        assert found.path == "output_layer" and found.missing_parts == 0
        np.testing.assert_array_equal(found.position, np.arange(truth.shape.tokens))
        for name, array in arrays.items():
            np.testing.assert_array_equal(getattr(found, name), array)
    assert recording.tokens(50, path="decoder.layers.0") == ()


def test_facts_modules_and_the_rest(written: tuple[Recording, Truth]) -> None:
    recording, truth = written
    shape = truth.shape
    facts = recording.facts()
    assert [each.rank for each in facts.ranks] == list(range(shape.world_size))
    assert facts.layout["tp"] == shape.tp and facts.model["hidden_size"] == shape.hidden
    assert facts.session.missing_ranks == 0 and all(each.ended_ns for each in facts.ranks)
    paths = [each.path for each in recording.modules()]
    assert paths[:2] == ["embedding.word_embeddings", "embedding"] and paths[-2:] == ["output_layer", ""]
    at = paths.index
    for layer in range(shape.layers):
        inner = f"decoder.layers.{layer}"
        attention = [
            f"{inner}.self_attention.{name}" for name in ("linear_qkv", "core_attention", "linear_proj")
        ]
        order = [f"{inner}.input_layernorm", *attention, f"{inner}.self_attention", f"{inner}.mlp", inner]
        assert [at(each) for each in order] == sorted(at(each) for each in order)
        assert layer == 0 or at(f"decoder.layers.{layer - 1}") < at(order[0])
    assert [each.text for each in recording.bookmarks()] == ["halfway"]
    assert len(recording.alerts()) == 2 and recording.alerts()[0].session == 0
    assert sum(each.frames for each in recording.dropped()) == 12 * shape.nodes
    assert len(recording.requests()) == 1


def test_overview_is_the_peak_and_the_mean_of_blocks(tmp_path: Path) -> None:
    size = 1000  # blocks of 8 and 64 end in smaller ones
    shape = RunShape(steps=10, tensor_every=10, token_every=0, interval=0, attention_tokens=size, tp=1, pp=1)
    truth = write_run(tmp_path, shape)
    recording = open_recording(tmp_path)
    key = next(each for each in recording.tensors(what="attention") if each.index["head"] == 1)
    exact = recording.tensor(key).values
    whole = truth.tensors[key.step, key.path, key.what, json.dumps(dict(key.index), sort_keys=True)]
    assert np.abs(exact - whole).max() <= recording.tensor(key).error * (1 + 1e-5) + 1e-7
    for pixels in (250, 125, 100, 16, 3):
        for reduce in ("peak", "mean"):
            made = recording.overview(key, pixels, pixels, reduce=reduce)  # type: ignore[arg-type]
            found, block = made.values, made.block
            assert max(found.shape) <= pixels
            rows = [exact[top : top + block] for top in range(0, size, block)]
            assert found.shape == (len(rows), len(rows))
            for row, part in list(zip(found, rows, strict=True))[:: max(1, len(rows) // 20)]:
                cells = [part[:, left : left + block] for left in range(0, size, block)]
                if reduce == "peak":
                    expected = [cell.flat[np.abs(cell).argmax()] for cell in cells]
                else:
                    expected = [cell.mean() for cell in cells]
                np.testing.assert_allclose(row, expected, rtol=2e-3, atol=1e-6)
    window = recording.overview(key, 64, 64, window=(128, 512, 64, 512)).values
    assert window.shape == (64, 64)
    assert window[0, 0] == pytest.approx(exact[128:136, 64:72].max(), rel=1e-3)
    with pytest.raises(ScopeError, match="expected one within 1000 rows"):
        recording.tensor(key, (990, 20, 0, 10))


def test_a_missing_part_is_marked_and_changes_the_value(tmp_path: Path) -> None:
    """The negative control of the comparisons above: one rank's part does change what comes out."""
    shape = RunShape(steps=10, tp=2, pp=1)
    files = scope_files(tmp_path)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    for rank in (0, 1):
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
    writer.tick([(0, stats_frame(shape, 0, 10))])
    writer.close()
    found = open_recording(tmp_path).series("decoder.layers.1", "gradient_norm")
    assert found.parts.tolist() == [1] and found.of.tolist() == [2] and found.partial.all()
    truth = truth_of(shape).values["decoder.layers.1", "gradient_norm"][10]
    assert abs(found.value[0] - truth) > 0.1 * truth


def test_a_node_that_is_behind_leaves_parts(tmp_path: Path) -> None:
    """Of two nodes one has not written the last sample: what the other has is one part of two."""
    shape = RunShape(steps=20, tp=2, pp=1, nodes=2)
    files = scope_files(tmp_path)
    files.root.mkdir()
    for rank, last in ((0, 20), (1, 10)):
        writer = Writer(files.node("a", rank), node=rank, host="a", retain_bytes=1 << 26)
        writer.tick([(rank, hello(shape, rank)), (rank, schema(shape, rank))])
        writer.tick([(rank, stats_frame(shape, rank, step)) for step in range(10, last + 1, 10)])
        writer.close()
    recording = open_recording(tmp_path)
    for step, parts in ((10, 2), (20, 1)):
        values = recording.values(step)
        assert values and {(each.parts, each.of) for each in values} == {(parts, 2)}
        assert all(each.partial == (parts < 2) for each in values)
        rows = query(recording, f"select distinct parts, of, partial from stats where step = {step}").rows
        assert rows == [(parts, 2, int(parts < 2))]
    found = recording.series("decoder.layers.1", "gradient_norm")
    assert found.parts.tolist() == [2, 1] and found.of.tolist() == [2, 2]
    assert found.only_whole().step.tolist() == [10] and found.only_whole().value.tolist() == [found.value[0]]
    steps = query(recording, "select distinct step from vectors").rows
    assert steps == [(10,)], "a vector of one node's parts is none"
    page = gathered(recording)
    assert page.partial > 0 and all(each.last.tolist() == [10] for each in page.maps)


def test_a_missing_node_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path, RunShape(steps=20, nodes=2, tp=1, pp=1, dp=2))
    scope_files(tmp_path).nodes()[1].unlink()
    recording = open_recording(tmp_path)
    assert recording.facts().session.missing_ranks == 1
    found = recording.series("decoder.layers.1", "activation_rms")
    assert len(found.step) == 2 and found.partial.all() and (found.parts == found.of).all()
    assert all(each.partial for each in recording.values(20))


def test_readers_open_while_it_is_written_and_elsewhere(tmp_path: Path) -> None:
    """Another thread reads all the time; each answer is whole and they only grow."""
    shape = RunShape(steps=60, tensor_every=20, token_every=20, interval=2)
    files = scope_files(tmp_path / "run")
    files.root.mkdir(parents=True)
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 28)
    ranks = range(shape.world_size)
    writer.tick([(rank, frame) for rank in ranks for frame in (hello(shape, rank), schema(shape, rank))])
    seen: list[int] = []
    troubles: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        try:
            with open_recording(tmp_path / "run") as recording:
                while not over.is_set():
                    steps = recording.steps().step
                    assert steps.tolist() == list(range(1, len(steps) + 1))
                    seen.append(len(steps))
                    for key in recording.tensors():
                        assert recording.tensor(key).missing == 0
        except BaseException as error:  # noqa: BLE001 - shown by the test
            troubles.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(1, 61):
        writer.tick([(rank, frame) for rank in ranks for frame in frames_of(shape, rank, step)])
    copied = tmp_path / "copy"
    # With what still lies in the write-ahead log.
    shutil.copytree(tmp_path / "run", copied)
    over.set()
    thread.join()
    writer.close()
    assert not troubles and seen == sorted(seen) and len(seen) > 1
    with open_recording(copied) as recording:
        assert len(recording.steps().step) == 60
        np.testing.assert_array_equal(recording.steps().loss, [loss_of(shape, step) for step in range(1, 61)])


@pytest.mark.parametrize("running", [True, False], ids=["while it is written", "after its end"])
def test_a_copy_that_nobody_may_write_to(tmp_path: Path, running: bool) -> None:
    """As root every folder can be written to: SQLite's own refusal is brought about by a folder in the place
    of the index of its log, or a link to nowhere in that of the log."""
    shape = RunShape(steps=5, interval=1, tensor_every=0, token_every=0)
    files = scope_files(tmp_path / "run")
    files.root.mkdir(parents=True)
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    writer.tick([(0, hello(shape, 0)), (0, schema(shape, 0))])
    writer.tick([(0, frame) for step in range(1, 6) for frame in frames_of(shape, 0, step)])
    if not running:
        writer.close()
    copied = scope_files(tmp_path / "copy")
    shutil.copytree(files.root, copied.root)
    if running:
        writer.close()
    (path,) = copied.nodes()
    assert Path(f"{path}-wal").exists() == running
    if running:
        Path(f"{path}-shm").unlink()
        Path(f"{path}-shm").mkdir()
    else:
        Path(f"{path}-wal").symlink_to(tmp_path / "nowhere" / "log")
    with open_recording(tmp_path / "copy") as recording:
        assert recording.steps().step.tolist() == [1, 2, 3, 4, 5]
        assert query(recording, "select count(*) from steps").rows == [(5,)]


def test_what_a_killed_writer_had_begun_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On network storage, where a part of a transaction is in the file before its end."""
    monkeypatch.setattr("mt_megatron.scope.recording.schema.keeps_shared_memory", lambda _: False)
    shape = RunShape(steps=40, interval=1, tensor_every=0, token_every=0, tp=1, pp=1)
    files = scope_files(tmp_path / "run")
    files.root.mkdir(parents=True)
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)
    writer.tick([(0, hello(shape, 0)), (0, schema(shape, 0))])
    writer.tick([(0, frame) for step in range(1, 41) for frame in frames_of(shape, 0, step)])
    execute = writer._connection.execute
    execute("PRAGMA cache_size=2")
    execute("BEGIN EXCLUSIVE")
    for table in ("step SET loss=99", "value SET number=99", "vector SET part=zeroblob(9)"):
        execute(f"UPDATE {table}")
    copied = scope_files(tmp_path / "copy")
    shutil.copytree(files.root, copied.root)
    execute("ROLLBACK")
    writer.close()
    (path,) = copied.nodes()
    assert Path(f"{path}-journal").stat().st_size > 512
    with open_recording(tmp_path / "copy") as recording:
        found = recording.steps().loss
        np.testing.assert_array_equal(found, [loss_of(shape, step) for step in range(1, 41)])
        assert query(recording, "select max(loss) < 99 from steps").rows == [(1,)]


def test_what_is_no_recording_is_said(tmp_path: Path) -> None:
    import sqlite3

    with pytest.raises(ScopeError, match="found no recording in .*scope; expected node-HOST"):
        open_recording(tmp_path)
    files = scope_files(tmp_path)
    files.root.mkdir()
    path = files.node("a", 0)
    path.write_bytes(b"no database at all" * 300)
    with pytest.raises(ScopeError, match="cannot be read as a recording"):
        open_recording(tmp_path)
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE x(y)")
    connection.commit()
    with pytest.raises(ScopeError, match="is an SQLite file, but no recording"):
        open_recording(tmp_path)
    connection.execute("PRAGMA application_id=0x4D545343")
    connection.execute("PRAGMA user_version=99")
    connection.commit()
    connection.close()
    with pytest.raises(ScopeError, match="found version 99 of the recording, expected 1"):
        open_recording(tmp_path)
    with pytest.raises(ScopeError, match="found version 99"):
        Writer(path, node=0, host="a", retain_bytes=1 << 26)


def test_damage_within_a_file_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, RunShape(steps=40, tensor_every=20))
    path = scope_files(tmp_path).nodes()[0]
    raw = bytearray(path.read_bytes())
    raw[8192 : len(raw) - 8192] = bytes(len(raw) - 16384)
    path.write_bytes(raw)
    with pytest.raises(ScopeError, match="cannot be read"):
        recording = open_recording(tmp_path)
        recording.steps()
        for name in recording.names():
            recording.series(name.path, name.statistic)


def test_unknown_things_are_said_or_empty(tmp_path: Path) -> None:
    write_run(tmp_path, RunShape(steps=10, tensor_every=0))
    recording = open_recording(tmp_path / "scope")
    with pytest.raises(ScopeError, match="there is no statistic 'activation_mean'"):
        recording.series("decoder.layers.0", "activation_mean")
    with pytest.raises(ScopeError, match="found session 7; expected one of 0 to 0"):
        recording.steps(session=7)
    assert len(recording.series("decoder.layers.99", "gradient_norm").step) == 0
    assert recording.values(5) == () and math.isnan(float(np.float64("nan")))
    recording.close()
    with pytest.raises(ScopeError, match="gone|closed"):
        recording.steps()
