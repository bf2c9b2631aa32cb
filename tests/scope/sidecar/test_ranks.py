"""Connections of ranks: what they send is kept, and what one does wrong costs the others nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.errors import ScopeError
from mt_megatron.scope.format.frames import encode
from mt_megatron.scope.recording.checks import LONGEST_PATH
from mt_megatron.scope.recording.files import read_requests, scope_files, write_requests
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.writer import Writer
from mt_megatron.scope.sidecar import ranks as module
from mt_megatron.scope.sidecar import sidecar as process
from mt_megatron.scope.sidecar.hub import Hub
from mt_megatron.scope.sidecar.keeper import Keeper
from tests.scope.sidecar.beside import Beside, beside
from tests.scope.sidecar.fake_ranks import FakeRank, until
from tests.scope.synthetic import RunShape, frames_of, hello, schema, step_frame, truth_of

SHAPE = RunShape(steps=20, interval=5, tp=2, pp=1, tensor_every=0, token_every=0)


def greeting(rank: int, shape: RunShape = SHAPE) -> list[dict[str, Any]]:
    return [hello(shape, rank), schema(shape, rank)]


def closed(rank: FakeRank) -> bool:
    """Whether the sidecar has closed the connection."""
    try:
        while rank.socket.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def steps_of(run: Path, rank: int) -> list[int]:
    with open_recording(run) as recording:
        steps = recording.steps().step.tolist()
        return [step for step in steps if any(each.rank == rank for each in recording.rank_steps(step))]


def test_all_that_ranks_send_is_recorded_and_it_ends_with_them(tmp_path: Path) -> None:
    shape = RunShape(steps=20, interval=5, tp=2, pp=2, experts=4, tensor_every=20, token_every=20)
    with beside(tmp_path, ranks=4) as sidecar:
        for rank in range(4):
            each = sidecar.rank(*greeting(rank, shape))
            for step in range(1, 21):
                each.send(*frames_of(shape, rank, step))
            each.send({"k": "bye"})
            each.close()
        sidecar.thread.join(20)  # by itself
        assert not sidecar.thread.is_alive() and sidecar.said == []
    truth = truth_of(shape)
    with open_recording(tmp_path) as recording:
        assert len(recording.tensors()) == len(truth.tensors)
        assert all(each.ended_ns for each in recording.facts().ranks)
        for (path, name), values in truth.values.items():
            found = recording.series(path, name)
            assert found.value == pytest.approx([values[step] for step in sorted(values)], rel=1e-9)
            assert not found.partial.any()
    assert not sidecar.socket.parent.exists()


LARGE = struct.pack("<I", 2**31)
MALFORMED = {
    "a length of 2 GiB": (LARGE + b"x" * 64, "expected at most"),
    "no msgpack": (struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", "no frame"),
    "no map": (struct.pack("<I", 2) + b"\x91\x01", "without a kind"),
    "an object of another kind": (struct.pack("<I", 6) + b"\x81\xa1k\xd4\x05x", "extension 5"),
    "an array that is too short": (
        struct.pack("<I", 15) + b"\x82\xa1k\xa1x\xa1v\xc7\x05\x01\x07floa",
        "damaged array",
    ),
}


@pytest.mark.parametrize(("data", "why"), MALFORMED.values(), ids=MALFORMED)
def test_bytes_that_are_no_frame_cut_that_rank_off_alone(data: bytes, why: str, tmp_path: Path) -> None:
    with beside(tmp_path) as sidecar:
        good, bad = (sidecar.rank(*greeting(rank), step_frame(SHAPE, rank, 1)) for rank in (0, 1))
        bad.socket.sendall(data)
        assert closed(bad)
        good.send(step_frame(SHAPE, 0, 2))
        until(lambda: sidecar.state(0)["step"] == 2)
        assert not sidecar.state(1)["connected"]
        (line,) = sidecar.said
        assert line.startswith("scope: rank 1 sent what cannot be read and is cut off") and why in line
    assert steps_of(tmp_path, 0) == [1, 2] and steps_of(tmp_path, 1) == [1]


def test_frames_that_are_wrong_are_left_out_counted_and_said_once(tmp_path: Path) -> None:
    with beside(tmp_path) as sidecar:
        rank = sidecar.rank(*greeting(0))
        for step in range(1, 4):
            wrong = {**step_frame(SHAPE, 0, step), "loss": "NaN"}
            rank.send({"k": "surprise", "i": step}, wrong, step_frame(SHAPE, 0, step))
        until(lambda: sidecar.state(0)["dropped_frames"] == 6)
    assert len(sidecar.said) == 2 and "surprise" in sidecar.said[0] and "loss" in sidecar.said[1]
    assert steps_of(tmp_path, 0) == [1, 2, 3]
    with open_recording(tmp_path) as recording:
        (dropped,) = recording.dropped()
        assert (dropped.source, dropped.rank, dropped.frames) == ("checks", 0, 6)
        (alert,) = (each for each in recording.alerts() if each.kind == "refused frames")
        assert "of rank 0 were refused" in alert.text


def test_texts_of_any_length_cost_neither_the_frame_nor_the_connection(tmp_path: Path) -> None:
    """Ranks do not know the bounds: marks grow with each perturbation, errors and names are the user's."""
    endless = "x" * 5000 + "\0\ud800"
    modules = [[f"a.{'b' * 600}.{name}", "C" * 300, 1] for name in ("first", "second")]
    about = {**hello(SHAPE, 0), "modules": modules, "host": endless, "model": {endless: endless}}
    entries = {"k": "schema", "id": 9, "entries": [[path, "activation_rms", 2] for path, _, _ in modules]}
    stats = {"k": "stats", "i": 1, "id": 9, "attempt": 0, "values": np.asarray([4.0, 1.0, 9.0, 1.0])}
    marked = {**step_frame(SHAPE, 0, 1), "perturbed": "; ".join(["p" * 40] * 1000)}
    with beside(tmp_path) as sidecar:
        rank = sidecar.rank(about, entries, stats, marked)
        rank.send({"k": "result", "id": "state", "ok": False, "value": None, "error": "e" * 5000})
        rank.send({"k": "result", "id": None, "ok": False}, step_frame(SHAPE, 0, 2))
        until(lambda: sidecar.state(0)["step"] == 2)
        assert sidecar.state(0)["connected"] and not sidecar.state(0)["dropped_frames"]
    (line,) = sidecar.said
    assert line.startswith("scope: an answer of rank 0 is left out: a result frame's id")
    assert steps_of(tmp_path, 0) == [1, 2]
    with open_recording(tmp_path) as recording:
        paths = [each.path for each in recording.modules()]
        assert len(set(paths)) == 2 and all(len(path) <= LONGEST_PATH for path in paths)
        assert [recording.series(path, "activation_rms").value.tolist() for path in paths] == [[2.0], [3.0]]
        ((step, text),) = recording.perturbed()
        assert step == 1 and text.startswith("pppp") and text.endswith(" ...")


def test_a_connection_that_does_not_begin_with_hello_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with beside(tmp_path) as sidecar:
        assert closed(sidecar.rank(step_frame(SHAPE, 0, 1)))
        assert closed(sidecar.rank({**hello(SHAPE, 0), "v": 99}))
        assert closed(sidecar.rank({**hello(SHAPE, 0), "rank": 7}))
        monkeypatch.setattr(module, "HELLO_SECONDS", 0.1)
        assert closed(sidecar.rank())  # silent
        assert [line.partition(": ")[2][:12] for line in sidecar.said] == ["a connection"] * 4
        assert "expected hello first" in sidecar.said[0] and "version 99" in sidecar.said[1]
        assert "rank 7 of 2" in sidecar.said[2] and "sent no hello" in sidecar.said[3]
        assert sidecar.states() == {}


def test_a_rank_that_ends_within_a_frame_loses_that_frame(tmp_path: Path) -> None:
    """And goes on when it connects again; nothing is said of it, since ranks die."""
    with beside(tmp_path) as sidecar:
        sidecar.rank(*greeting(0), step_frame(SHAPE, 0, 1))
        torn = sidecar.rank(*greeting(1), step_frame(SHAPE, 1, 1))
        data = encode(step_frame(SHAPE, 1, 2))
        torn.socket.sendall(data[: len(data) // 2])
        torn.close()
        until(lambda: sidecar.state(1)["connected"] is False)
        sidecar.rank(*greeting(1), step_frame(SHAPE, 1, 3))
        until(lambda: sidecar.state(1)["step"] == 3)
        assert sidecar.said == []
    assert steps_of(tmp_path, 1) == [1, 3] and steps_of(tmp_path, 0) == [1]
    with open_recording(tmp_path) as recording:
        assert len(recording.sessions()) == 1 and recording.dropped() == ()


def test_a_second_connection_of_a_rank_replaces_the_first(tmp_path: Path) -> None:
    with beside(tmp_path) as sidecar:
        first = sidecar.rank(*greeting(0), step_frame(SHAPE, 0, 1))
        until(lambda: sidecar.state(0)["step"] == 1)
        second = sidecar.rank(*greeting(0), step_frame(SHAPE, 0, 2))
        assert closed(first)
        until(lambda: sidecar.state(0)["step"] == 2)
        second.send(step_frame(SHAPE, 0, 3))
        until(lambda: sidecar.state(0)["step"] == 3)
        assert sidecar.state(0)["connected"]
    assert steps_of(tmp_path, 0) == [1, 2, 3]


def test_the_hello_of_another_rank_is_refused(tmp_path: Path) -> None:
    with beside(tmp_path) as sidecar:
        rank = sidecar.rank(*greeting(0), hello(SHAPE, 1))
        assert closed(rank) and "hello of rank 1 in a connection of 0" in sidecar.said[0]


def test_requests_reach_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the file, whoever wrote it, and of ranks that come later."""
    monkeypatch.setattr(process, "POLL_SECONDS", 0.05)
    texts = ["attention@decoder.layers.*:heads=0", "mlp@decoder.layers.1"]
    with beside(tmp_path) as sidecar:
        rank = sidecar.rank(*greeting(0))
        until(sidecar.states)
        write_requests(scope_files(tmp_path), texts)
        assert rank.hear("watch")["requests"] == texts
        assert sidecar.rank(*greeting(1)).hear("watch")["requests"] == texts
        write_requests(scope_files(tmp_path), [])
        assert rank.hear("watch")["requests"] == []
        write_requests(scope_files(tmp_path), texts[1:])
        assert rank.hear("watch")["requests"] == texts[1:]
        scope_files(tmp_path).requests.unlink()
        assert rank.hear("watch")["requests"] == []
        assert sidecar.said == []
    with open_recording(tmp_path) as recording:
        asked = [json.loads(each) for _, each in recording.requests()]
        assert asked == [texts, [], texts[1:], []]


def test_a_file_system_that_does_not_answer_holds_up_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def waiting(files: Any) -> list[str]:
        answers.wait(20)
        return read_requests(files)

    monkeypatch.setattr(process, "read_requests", waiting)
    write_requests(scope_files(tmp_path), ["mlp@decoder.layers.1"])
    with beside(tmp_path) as sidecar:
        rank = sidecar.rank(*greeting(0), step_frame(SHAPE, 0, 1))
        until(lambda: sidecar.state(0)["step"] == 1, 10)
        answers.set()
        assert rank.hear("watch")["requests"] == ["mlp@decoder.layers.1"]


def test_requests_of_the_page_reach_the_ranks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "POLL_SECONDS", 3600.0)
    with beside(tmp_path) as sidecar:
        rank = sidecar.rank(*greeting(0))
        until(sidecar.states)

        async def asked() -> None:
            sidecar.hub.set_requests(["mlp@decoder.layers.1"])

        sidecar.ask(asked())
        assert rank.hear("watch")["requests"] == ["mlp@decoder.layers.1"]


def test_a_damaged_requests_file_is_one_line_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "POLL_SECONDS", 0.05)
    with beside(tmp_path) as sidecar:
        rank = sidecar.rank(*greeting(0))
        until(sidecar.states)
        file = scope_files(tmp_path).requests
        damaged = tmp_path / "damaged"
        damaged.write_text('{"requests": [3]}')
        damaged.replace(file)  # at once: an empty file is damaged otherwise
        until(lambda: sidecar.said)
        write_requests(scope_files(tmp_path), ["mlp@decoder"])
        assert rank.hear("watch")["requests"] == ["mlp@decoder"]  # the first that is sent
    (line,) = sidecar.said
    assert "the requests stay as they are" in line


def test_commands_reach_rank_0_and_answers_come_back(tmp_path: Path) -> None:
    with beside(tmp_path) as sidecar:
        nobody = sidecar.ask(sidecar.hub.command("pause"))
        assert not nobody.ok and "rank 0 is not connected" in str(nobody.error)
        other, rank = sidecar.rank(*greeting(1)), sidecar.rank(*greeting(0))
        until(lambda: len(sidecar.states()) == 2)

        async def asked() -> Any:
            waiting = asyncio.ensure_future(sidecar.hub.command("step", {"n": 3}, timeout_s=15))
            frame = await asyncio.to_thread(rank.hear, "command")
            assert (frame["do"], frame["arguments"]) == ("step", {"n": 3})
            await asyncio.to_thread(
                rank.send, {"k": "result", "id": frame["id"], "ok": True, "value": {"step": 7}}
            )
            return await waiting

        result = sidecar.ask(asked())
        assert result.ok and result.value == {"step": 7}
        silent = sidecar.ask(sidecar.hub.command("pause", timeout_s=0.05))
        assert not silent.ok and "no answer to 'pause' within 0.05 s" in str(silent.error)
        other.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.hear("command")


def test_a_rank_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    """Its socket's buffer and 1 MiB here are all that is kept for it."""
    with beside(tmp_path) as sidecar:
        sidecar.rank(*greeting(0))
        until(sidecar.states)
        large = {"prompt": "x" * 400_000}
        results = [sidecar.ask(sidecar.hub.command("generate", large, timeout_s=0.02)) for _ in range(8)]
        assert "not connected" in str(results[-1].error)
        assert [line for line in sidecar.said if "rank 0 reads nothing" in line] == sidecar.said[:1]


def test_places_that_are_not_private_are_refused(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o755)
    with pytest.raises(ScopeError, match="has mode 755, owner .*; expected 700"):
        module.make_private(open_folder)
    (tmp_path / "link").symlink_to(open_folder)
    with pytest.raises(ScopeError, match="the socket's folder"):
        module.make_private(tmp_path / "link")
    module.make_private(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_path_that_sockets_cannot_have_is_refused(tmp_path: Path) -> None:
    keeper = Keeper(_a_writer(tmp_path))
    ranks = module.Ranks(keeper, Hub(scope_files(tmp_path), live=True), print)
    with pytest.raises(ScopeError, match="bytes; expected 107 at most. Set TMPDIR"):
        asyncio.run(ranks.listen(tmp_path / ("x" * 120)))
    keeper.close()


def _a_writer(run: Path) -> Writer:
    files = scope_files(run)
    files.root.mkdir()
    return Writer(files.node("a", 0), node=0, host="a", retain_bytes=1 << 26)


def test_the_socket_is_private_and_of_this_user(tmp_path: Path) -> None:
    with beside(tmp_path) as sidecar:
        assert os.stat(sidecar.socket).st_mode & 0o777 == 0o600
        assert os.stat(sidecar.socket.parent).st_mode & 0o777 == 0o700
        with pytest.raises(ScopeError, match="another sidecar listens"):
            _start_again(sidecar)


def _start_again(sidecar: Beside) -> None:
    async def again() -> None:
        await module._free(sidecar.socket)

    sidecar.ask(again())


def test_a_socket_that_a_killed_sidecar_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    asyncio.run(module._free(path))
    assert not path.exists()
