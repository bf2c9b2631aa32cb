"""Tensors whose shape changes, small values, curves that end in NaN, and how much a page's source keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mt_megatron.scope.format.frames import decode, encode
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.recording.writer import Writer
from mt_megatron.scope.report.status import status_of
from mt_megatron.scope.web import recorded as recorded_source
from mt_megatron.scope.web.recorded import RecordedSource
from mt_megatron.scope.web.views.context import Context
from tests.scope.synthetic import RunShape, Truth, hello, schema, step_frame, write_run
from tests.scope.web.test_data import answered

PATH = "decoder.layers.0"
ONE = RunShape(steps=1, tp=1, pp=1, tensor_every=0, token_every=0)


def tensor_frame(step: int, values: NDArray[np.float32]) -> dict[str, Any]:
    """A whole tensor of one rank, exact."""
    frame = {
        "k": "tensor",
        "i": step,
        "attempt": 0,
        "path": PATH,
        "what": "activation",
        "index": {"sample": 0},
        "shape": list(values.shape),
        "encoding": "f32",
        "offset": [0] * values.ndim,
        "data": values,
    }
    return decode(encode(frame)[4:])


def write(run: Path, frames: Sequence[dict[str, Any]]) -> None:
    files = scope_files(run)
    files.root.mkdir(parents=True)
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 28)
    writer.tick([(0, hello(ONE, 0)), (0, schema(ONE, 0)), (0, step_frame(ONE, 0, 1))])
    writer.tick([(0, frame) for frame in frames])
    writer.close()
    assert writer.stopped is None and not writer.lost


@pytest.fixture
def narrowed(tmp_path: Path) -> Iterator[tuple[Context, dict[int, NDArray[np.float32]]]]:
    """A tensor of 300 tokens, then of 100, then of 600, as requests with other ``tokens`` record it."""
    draw = np.random.default_rng(5)
    rows = {10: 300, 20: 300, 30: 100, 40: 600}
    sizes = np.array([30.0, 10.0, 1, 1, 1, 1, 1, 1])
    values = {
        step: (sizes * draw.standard_normal((count, 8))).astype(np.float32) for step, count in rows.items()
    }
    write(tmp_path, [tensor_frame(step, each) for step, each in values.items()])
    with open_recording(tmp_path) as recording:
        yield Context(source=RecordedSource(recording, "run"), folder=tmp_path), values


def test_shapes_are_told_by_step(narrowed: tuple[Context, dict[int, NDArray[np.float32]]]) -> None:
    (row,) = answered(narrowed[0], "tensors")[0]["tensors"]
    assert row["shapes"] == [[10, [300, 8]], [30, [100, 8]], [40, [600, 8]]] and row["shape"] == [600, 8]


@pytest.mark.parametrize("step", [10, 20, 30, 40])
def test_views_of_a_tensor_whose_shape_changes(
    narrowed: tuple[Context, dict[int, NDArray[np.float32]]], step: int
) -> None:
    context, values = narrowed
    whole = values[step]
    (row,) = answered(context, "tensors")[0]["tensors"]
    query = {"tensor": row["id"], "step": step}
    last = (len(whole) - 1) // 256
    for number in range(last + 1):
        facts, arrays = answered(context, "tile", **query, row=number)
        shown = facts["low"] + facts["scale"] * arrays["codes"].astype(np.float64)
        expected = whole[256 * number : 256 * (number + 1)]
        assert facts["rows"] == len(whole) and shown.shape == expected.shape
        assert np.abs(shown - expected).max() <= facts["error"] * (1 + 1e-5)
    with pytest.raises(KeyError, match="no tile"):
        answered(context, "tile", **query, row=last + 1)
    facts, _ = answered(context, "summary", **query)
    assert facts["shape"] == [len(whole), 8] and facts["looked_at"] == whole.size
    assert facts["high"] == pytest.approx(float(whole.max()))
    facts, _ = answered(context, "thumbs", step=step, what="activation")
    assert [each["shape"] for each in facts["rows"]] == [[len(whole), 8]]


def test_projection_has_its_basis_of_the_same_shape(
    narrowed: tuple[Context, dict[int, NDArray[np.float32]]],
) -> None:
    context, values = narrowed
    (row,) = answered(context, "tensors")[0]["tensors"]
    for step, basis in ((40, 40), (20, 10), (30, 30), (10, 10), (40, 40)):
        facts, arrays = answered(context, "projection", tensor=row["id"], step=step)
        first = values[basis].astype(np.float64)
        directions = np.linalg.svd(first - first.mean(axis=0), full_matrices=False)[2][:2]
        points = (values[step] - first.mean(axis=0)) @ directions.T
        assert facts["basis_step"] == basis and arrays["points"].shape == points.shape
        np.testing.assert_allclose(np.abs(arrays["points"]), np.abs(points), atol=0.2 * np.abs(points).max())


def test_coarse_tile_of_small_values(tmp_path: Path) -> None:
    """Gradients of 1e-9 are below float16's range."""
    values = (1e-9 * np.random.default_rng(6).standard_normal((1024, 1024))).astype(np.float32)
    write(tmp_path, [tensor_frame(10, values)])
    blocks = values.reshape(128, 8, 128, 8).transpose(0, 2, 1, 3).reshape(128, 128, 64)
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(2)[..., None], 2)[..., 0]
    with open_recording(tmp_path) as recording:
        context = Context(source=RecordedSource(recording, "run"), folder=tmp_path)
        (row,) = answered(context, "tensors")[0]["tensors"]
        for by, expected in (("max", peaks), ("mean", blocks.mean(2, dtype=np.float64))):
            facts, arrays = answered(context, "tile", tensor=row["id"], step=10, level=3, by=by)
            shown = facts["low"] + facts["scale"] * arrays["codes"].astype(np.float64)
            assert np.abs(shown - expected).max() <= facts["error"] * (1 + 1e-4)
            assert facts["error"] < 0.01 * np.ptp(expected)


def test_curve_that_ends_in_nan_has_all_its_points(recorded: tuple[Path, Truth]) -> None:
    run, truth = recorded
    with open_recording(run) as recording:
        context = Context(source=RecordedSource(recording, "run"), folder=run)
        facts, arrays = answered(context, "model", statistic="activation_rms")
    rows = {row["path"]: row for row in facts["rows"]}
    for path, ends in (("decoder.layers.2", True), ("decoder.layers.1", False)):
        own = arrays["values"][rows[path]["curve"]][: rows[path]["points"]]
        assert len(own) == len(truth.values[path, "activation_rms"]) and bool(np.isnan(own[-1])) == ends


def test_token_rows_are_listed_without_their_arrays(
    recorded: tuple[Path, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_recording(recorded[0]) as recording:
        expected = [
            (each.step, each.sample, each.microbatch, each.path)
            for step in recording.token_steps()
            for each in recording.tokens(step)
        ]

        def read(*_: object, **__: object) -> None:
            raise AssertionError("arrays were read")

        monkeypatch.setattr(Recording, "tokens", read)
        assert RecordedSource(recording, "run").token_rows() == sorted(expected) and expected
        assert recording.token_keys(21, 40) == tuple(each for each in expected if each[0] == 40)


def test_what_is_kept_is_bounded_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, RunShape(steps=40, tensor_every=0, token_every=2))
    monkeypatch.setattr(recorded_source, "KEPT_BYTES", 200_000)
    read = Recording.tokens
    reads: list[int] = []

    def counted(self: Recording, step: int, **more: Any) -> Any:
        reads.append(step)
        return read(self, step, **more)

    monkeypatch.setattr(Recording, "tokens", counted)
    with open_recording(tmp_path) as recording:
        source = RecordedSource(recording, "run")
        keys = source.token_rows()
        total = 0
        for key in keys:
            row = source.tokens(key)
            total += sum(array.nbytes for array in vars(row).values())
        sizes = [recorded_source.size_of(entry[2]) for entry, _ in source._kept._kept.values()]
        assert total > 600_000 and 100_000 < sum(sizes) <= 200_000 and reads == [key.step for key in keys]
        source.tokens(keys[-1])
        assert len(reads) == len(keys), "the newest is kept"
        monkeypatch.setattr(recorded_source, "KEPT_BYTES", 10_000)
        source = RecordedSource(recording, "run")
        for _ in range(2):
            source.tokens(keys[0])
        assert len(reads) == len(keys) + 1, "one that is larger than the bound is kept alone"


def test_bookmarks_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    write_run(tmp_path, RunShape(steps=4, tensor_every=0, token_every=0))
    scope_files(tmp_path).bookmarks.write_text("[" + " " * 2**21)
    with open_recording(tmp_path) as recording:
        source = RecordedSource(recording, "run")
        assert source.bookmarks() == []
        (note,) = [each for each in source.dropped().notes if "bookmarks" in each]
        assert "expected at most 262,144" in note


def test_frames_dropped_in_several_attempts_count_once(tmp_path: Path) -> None:
    """Sums count since the processes' start, and each attempt has its own row of them."""
    frames: list[dict[str, Any]] = []
    for attempt in range(4):
        frames.append({**step_frame(ONE, 0, attempt + 1), "attempt": attempt})
        frames.append({"k": "dropped", "frames": 100 + attempt, "bytes": 1000})
    write(tmp_path, frames)
    with open_recording(tmp_path) as recording:
        assert len(recording.sessions()) == 4
        (row,) = recording.dropped()
        assert (row.frames, row.session) == (103, 3)
        assert RecordedSource(recording, "run").dropped().frames == 103
        assert [each.frames for each in status_of(recording).dropped] == [103]
