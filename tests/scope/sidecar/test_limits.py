"""A full disk, a slow disk, a slow page: what does not fit is dropped, counted and said; training goes on."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.errors import ScopeError
from mt_megatron.scope.recording import writer as recording_writer
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.writer import Writer
from mt_megatron.scope.sidecar import keeper as module
from mt_megatron.scope.sidecar.hub import MOST_COMMANDS, Hub, recording_hub
from mt_megatron.scope.sidecar.keeper import Keeper
from mt_megatron.scope.watch.sender import Parcel, Sender
from tests.scope.sidecar.beside import beside
from tests.scope.sidecar.fake_ranks import until
from tests.scope.synthetic import RunShape, hello, schema, step_frame

SHAPE = RunShape(tp=1, pp=1)


def tensor(step: int, kib: int = 64) -> dict[str, Any]:
    data = np.full((kib * 4, 64), float(step), np.float32)
    return {
        "k": "tensor",
        "i": step,
        "attempt": 0,
        "path": "decoder.layers.0",
        "what": "activation",
        "index": {},
        "shape": list(data.shape),
        "offset": [0, 0],
        "encoding": "f32",
        "data": data,
    }


def small_disk(pages: int) -> Callable[..., sqlite3.Connection]:
    """``connect_writer`` on a disk that has room for ``pages`` of 4 KiB: SQLite's own ENOSPC."""
    connect = recording_writer.connect_writer

    def connected(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.execute(f"PRAGMA max_page_count={pages}")
        return connection

    return connected


def test_a_full_disk_is_one_line_and_the_rank_does_not_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_writer, "connect_writer", small_disk(150))
    lines: list[str] = []
    with beside(tmp_path) as sidecar:
        sender = Sender(str(sidecar.socket), lambda: hello(SHAPE, 0), heard=lambda _: None, say=lines.append)
        sender.start()
        for step in range(1, 41):
            assert sender.put(Parcel(frames=lambda step=step: [step_frame(SHAPE, 0, step)], size=256))
            assert sender.put(Parcel(frames=lambda step=step: [tensor(step)], size=64 << 10))
        until(lambda: sidecar.state(0)["step"] == 40)
        until(lambda: sidecar.state(0)["dropped_frames"])
        assert sender.ended is None and sender.dropped == (0, 0)
        sender.close()
    assert lines == []
    (line,) = sidecar.said
    assert "the disk is full" in line and "training goes on" in line
    with open_recording(tmp_path) as recording:  # what was there stays whole
        for key in recording.tensors():
            assert recording.tensor(key).values[0, 0] == key.step
        assert len(recording.steps().step) < 40


def test_a_disk_that_is_full_from_the_start_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(recording_writer, "connect_writer", full)
    with (
        pytest.raises(
            ScopeError, match="cannot be written .*full.*; expected a folder with room.*--scope-dir"
        ),
        beside(tmp_path),
    ):
        pass
    (tmp_path / "other" / "scope").mkdir(parents=True)
    (tmp_path / "other" / "scope").rmdir()
    (tmp_path / "other" / "scope").write_text("in the way")
    monkeypatch.undo()
    with pytest.raises(ScopeError, match="cannot be written"), beside(tmp_path / "other"):
        pass


def a_keeper(run: Path) -> Keeper:
    files = scope_files(run)
    files.root.mkdir()
    writer = Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 27)
    writer.tick([(0, hello(SHAPE, 0)), (0, schema(SHAPE, 0))])
    return Keeper(writer)


def test_a_slow_disk_drops_tensors_first_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread does not run: frames wait. Above the soft bound tensors go, steps stay."""
    monkeypatch.setattr(module, "SOFT_BYTES", 1 << 20)
    monkeypatch.setattr(module, "HARD_BYTES", 2 << 20)
    keeper = a_keeper(tmp_path)
    kept = [keeper.put(0, tensor(step, 256)) for step in range(1, 11)]
    assert kept == [True] * 3 + [False] * 7
    assert all(keeper.put(0, step_frame(SHAPE, 0, step)) for step in range(1, 11))
    frames, size = keeper.dropped()[0]
    assert frames == 7 and size >= 7 * (256 << 10)
    assert keeper.has_room(0)
    keeper.close()
    with open_recording(tmp_path) as recording:
        assert [key.step for key in recording.tensors()] == [1, 2, 3]
        assert recording.steps().step.tolist() == list(range(1, 11))
        (dropped,) = recording.dropped()
        assert (dropped.source, dropped.rank, dropped.frames, dropped.bytes) == ("sidecar", 0, 7, size)


def test_the_socket_is_not_read_above_the_hard_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HARD_BYTES", 4 << 10)
    keeper = a_keeper(tmp_path)
    count = 0
    while keeper.has_room(0):
        assert keeper.put(0, step_frame(SHAPE, 0, count))
        count += 1
    while keeper.put(0, step_frame(SHAPE, 0, count)):  # what was read already
        count += 1
    assert count >= 32 and keeper.dropped()[0][0] == 1
    assert keeper.has_room(1), "another rank's buffer is its own"
    keeper.close()
    assert keeper.has_room(0)
    assert len(open_recording(tmp_path).steps().step) == count


def test_flush_waits_until_all_is_written(tmp_path: Path) -> None:
    keeper = a_keeper(tmp_path)
    keeper.start()
    for step in range(1, 101):
        keeper.put(0, step_frame(SHAPE, 0, step))
    keeper.flush()
    with open_recording(tmp_path) as recording:
        assert recording.last_step() == 100
    keeper.close()
    assert not Path(f"{scope_files(tmp_path).nodes()[0]}-wal").exists()


def test_a_slow_subscriber_misses_events_and_is_told_how_many(tmp_path: Path) -> None:
    async def main() -> None:
        hub = Hub(scope_files(tmp_path), live=True)
        slow, quick = hub.subscribe(most=3), hub.subscribe()
        for step in range(10):
            hub.publish({"k": "step", "step": step})
        assert (slow.dropped, quick.dropped) == (7, 0)
        assert [(await slow.__anext__())["step"] for _ in range(3)] == [0, 1, 2]
        hub.publish({"k": "step", "step": 10})
        assert [await slow.__anext__() for _ in range(2)] == [
            {"k": "lost", "events": 7},
            {"k": "step", "step": 10},
        ]
        assert [(await quick.__anext__())["step"] for _ in range(11)] == list(range(11))
        hub.close()
        assert [event async for event in quick] == []
        hub.publish({"k": "step", "step": 11})  # nobody listens any more

    asyncio.run(main())


def test_commands_that_wait_are_bounded_and_end_with_the_sidecar(tmp_path: Path) -> None:
    async def main() -> None:
        hub = Hub(scope_files(tmp_path), live=True)
        hub.attach(send=lambda _: True, states=tuple)
        waiting = [asyncio.ensure_future(hub.command("pause")) for _ in range(MOST_COMMANDS)]
        await asyncio.sleep(0)
        more = await hub.command("pause")
        assert not more.ok and f"{MOST_COMMANDS} commands wait already" in str(more.error)
        hub.close()
        assert {str((await each).error) for each in waiting} == {"the sidecar ends"}

    asyncio.run(main())


def test_a_recording_takes_no_commands(tmp_path: Path) -> None:
    with pytest.raises(ScopeError, match="found no folder"):
        recording_hub(scope_files(tmp_path))
    scope_files(tmp_path).root.mkdir()
    result = asyncio.run(recording_hub(scope_files(tmp_path)).command("pause"))
    assert not result.ok and "this is a recording" in str(result.error)
