"""Stored overviews: values far from 1, values that are not finite, files from before units were stored."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mt_megatron.scope.format.frames import decode, encode
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.writer import Writer
from tests.scope.synthetic import RunShape, hello, schema, step_frame

SIZE = 1024
SHAPE = RunShape(steps=1, tp=1, pp=1, tensor_every=0, token_every=0)


def write(run: Path, values: NDArray[np.float32]) -> Path:
    """A recording of one gradient in two shards; its file."""
    files = scope_files(run)
    files.root.mkdir()
    path = files.node("a", 0)
    writer = Writer(path, node=0, host="a", retain_bytes=1 << 28)
    writer.tick([(0, hello(SHAPE, 0)), (0, schema(SHAPE, 0)), (0, step_frame(SHAPE, 0, 1))])
    half = SIZE // 2
    for first in (0, half):
        frame = {
            "k": "tensor",
            "i": 1,
            "attempt": 0,
            "path": "decoder.layers.0",
            "what": "gradient",
            "index": {},
            "shape": list(values.shape),
            "encoding": "f32",
            "offset": [first, 0],
            "data": np.ascontiguousarray(values[first : first + half]),
        }
        writer.tick([(0, decode(encode(frame)[4:]))])
    writer.close()
    assert writer.stopped is None and not writer.lost
    return path


def blocks_of(values: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    count = SIZE // block
    found: NDArray[np.float32] = values.reshape(count, block, count, block).transpose(0, 2, 1, 3)
    return found.reshape(count, count, block * block)


def peaks_of(values: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    cells = blocks_of(values, block)
    return np.take_along_axis(cells, np.abs(cells).argmax(2)[..., None], 2)[..., 0]


def means_of(values: NDArray[np.float32], block: int) -> NDArray[np.float64]:
    found: NDArray[np.float64] = blocks_of(values, block).mean(2, dtype=np.float64)
    return found


def drawn(size: float) -> NDArray[np.float32]:
    return (size * np.random.default_rng(9).standard_normal((SIZE, SIZE))).astype(np.float32)


def agree(run: Path, values: NDArray[np.float32], *, fine: float = 2.0**-10) -> None:
    """Every overview lies within its stated error of the definition, and this error is small."""
    with open_recording(run) as recording:
        (key,) = recording.tensors()
        for block in (8, 16, 64):
            count = SIZE // block
            for reduce, of in (("peak", peaks_of), ("mean", means_of)):
                found = recording.overview(key, count, count, reduce=reduce)  # type: ignore[arg-type]
                expected = of(values, block)
                assert found.block == block and found.values.shape == expected.shape
                seen = found.values.astype(np.float64)
                if reduce == "peak":  # rounded, 1 and -1.0001 are as large
                    seen, expected = np.abs(seen), np.abs(expected)
                away = np.abs(seen - expected).max()
                largest = np.abs(expected).max()
                assert away <= found.error + 1e-6 * np.abs(values).max(), (block, reduce)
                assert found.error <= fine * largest * (1 if block != 16 or reduce == "peak" else 8)


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e-3, 1.0, 1e9, 1e30])
def test_overviews_keep_their_precision_at_any_size(tmp_path: Path, size: float) -> None:
    values = drawn(size)
    path = write(tmp_path, values)
    agree(tmp_path, values)
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT level, sum(length(data)) FROM chunk GROUP BY level").fetchall()
    assert dict(rows) == {0: 4 * SIZE**2, 1: 4 * SIZE**2 // 64, 2: 4 * SIZE**2 // 4096}


def test_zeros_are_exact(tmp_path: Path) -> None:
    write(tmp_path, np.zeros((SIZE, SIZE), np.float32))
    with open_recording(tmp_path) as recording:
        found = recording.overview(recording.tensors()[0], 128, 128)
    assert not found.values.any() and found.error == 0


def test_values_that_are_not_finite_stay_so(tmp_path: Path) -> None:
    values = drawn(1e-9)
    values[0, 0], values[0, 8], values[0, 16] = np.inf, -np.inf, np.nan
    write(tmp_path, values)
    with open_recording(tmp_path) as recording:
        found = recording.overview(recording.tensors()[0], 128, 128)
    assert found.values[0, 0] == np.inf and found.values[0, 1] == -np.inf and np.isnan(found.values[0, 2])
    assert np.abs(found.values[1:] - peaks_of(values, 8)[1:]).max() <= found.error < 1e-11


def without_units(path: Path) -> None:
    """The file as it was written before overviews had units: float16, saturated."""
    connection = sqlite3.connect(path)
    for shard, level, rows, columns, data, scale in connection.execute(
        "SELECT shard, level, rows, columns, data, scale FROM chunk WHERE level>0"
    ).fetchall():
        half: Any = np.frombuffer(data, "<f2").reshape(2, rows, columns).astype(np.float64)
        half *= np.frombuffer(scale, "<f4")[:, None, None]
        old = np.clip(half, -65_504, 65_504).astype("<f2")
        connection.execute(
            "UPDATE chunk SET data=?, scale=NULL WHERE shard=? AND level=?", (old.tobytes(), shard, level)
        )
    connection.commit()
    connection.close()


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_overviews_without_units_are_used_where_float16_had_room(tmp_path: Path, size: float) -> None:
    values = drawn(size)
    without_units(write(tmp_path, values))
    agree(tmp_path, values)
