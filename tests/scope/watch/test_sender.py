"""A sidecar that is dead, frozen or slow: nothing waits for it, memory is bounded, drops are counted."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mt_megatron.scope.format.frames import Decoder, encode
from mt_megatron.scope.watch.sender import MOST_QUEUED, Parcel, Sender

MIB = 2**20


class Server:
    """The other end of a socket."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self.path)
        self._server.listen(1)

    def accept(self) -> socket.socket:
        self._server.settimeout(20)
        return self._server.accept()[0]

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "s")
    yield made
    made.close()


def sender_to(
    path: str, said: list[str], heard: Callable[[Any], None] = lambda frame: None, **more: Any
) -> Sender:
    sender = Sender(path, lambda: {"k": "hello", "rank": 3}, heard=heard, say=said.append, **more)
    sender.start()
    return sender


def parcel(size: int, number: int = 0) -> Parcel:
    def frames() -> list[dict[str, Any]]:
        return [{"k": "tensor", "number": number, "data": np.zeros(size, np.uint8)}]

    return Parcel(frames=frames, size=size)


def frames_from(link: socket.socket, until: str) -> list[dict[str, Any]]:
    decoder, found = Decoder(), list[dict[str, Any]]()
    link.settimeout(20)
    while not found or found[-1]["k"] != until:
        found += decoder.feed(link.recv(65536))
    return found


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_frames_arrive_in_order_after_a_hello(server: Server) -> None:
    sender = sender_to(server.path, [])
    link = server.accept()
    for number in range(50):
        assert sender.put(parcel(1000, number))
    sender.put(Parcel(frames=lambda: [{"k": "bye"}], size=10, must=True))
    found = frames_from(link, "bye")
    assert [frame["k"] for frame in found] == ["hello", *["tensor"] * 50, "bye"]
    assert [frame["number"] for frame in found[1:-1]] == list(range(50))
    sender.close()
    assert sender.dropped == (0, 0)


def test_what_the_sidecar_says_is_heard(server: Server) -> None:
    heard: list[Any] = []
    sender = sender_to(server.path, [], heard.append)
    link = server.accept()
    link.sendall(encode({"k": "watch", "requests": ["mlp@decoder.layers.0"]}))
    eventually(lambda: bool(heard))
    assert heard == [{"k": "watch", "requests": ["mlp@decoder.layers.0"]}]
    sender.close()


def test_a_message_that_cannot_be_handled_ends_nothing(server: Server) -> None:
    said: list[str] = []

    def broken(frame: Any) -> None:
        raise ValueError("no such thing")

    sender = sender_to(server.path, said, broken)
    link = server.accept()
    link.sendall(encode({"k": "watch"}))
    eventually(lambda: bool(said))
    assert said == ["a message of the sidecar was not understood: ValueError: no such thing"]
    assert sender.put(parcel(10)) and sender.ended is None
    sender.close()


def test_a_frozen_sidecar_costs_a_full_queue_and_drops_are_counted(server: Server) -> None:
    said: list[str] = []
    sender = sender_to(server.path, said)
    link = server.accept()
    before = psutil.Process().memory_info().rss
    made = [0]

    def big() -> Parcel:
        # Allocated when it is handed over, as a step's tensors are.
        data = np.ones(4 * MIB, np.uint8)
        made[0] += 1
        return Parcel(frames=lambda: [{"k": "tensor", "data": data}], size=data.nbytes)

    taken = sum(sender.put(big()) for _ in range(200))
    # One may have left the queue for the socket.
    assert MOST_QUEUED // (4 * MIB) <= taken <= MOST_QUEUED // (4 * MIB) + 1
    assert sender.dropped == (200 - taken, (200 - taken) * 4 * MIB)
    time.sleep(0.2)
    assert psutil.Process().memory_info().rss - before <= 64 * MIB
    # It thaws: what was kept arrives, and how much was not.
    sender.put(Parcel(frames=lambda: [{"k": "bye"}], size=10, must=True))
    found = frames_from(link, "bye")
    drops = [frame for frame in found if frame["k"] == "dropped"]
    assert drops and drops[-1]["frames"] == 200 - taken
    assert sum(frame["k"] == "tensor" for frame in found) == taken
    assert not said
    sender.close()


def test_a_slow_sidecar_gets_what_there_is_room_for(server: Server) -> None:
    sender = sender_to(server.path, [], most_bytes=MIB)
    link = server.accept()
    stopped = threading.Event()

    def read() -> None:
        link.settimeout(0.1)
        while not stopped.is_set():
            try:
                link.recv(1)
            except OSError:
                continue
            time.sleep(0.001)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    taken = sum(sender.put(parcel(MIB // 4)) for _ in range(400))
    assert 4 <= taken < 20
    assert sender.dropped[0] == 400 - taken
    stopped.set()
    reader.join()
    sender.close()


def test_a_dead_sidecar_is_told_once_and_everything_is_dropped(server: Server) -> None:
    said: list[str] = []
    sender = sender_to(server.path, said)
    server.accept().close()
    eventually(lambda: bool(said))
    assert not sender.put(parcel(1000)) and not sender.put(parcel(1000))
    assert sender.dropped[0] >= 2 and len(said) == 1
    assert "closed the connection" in said[0] or "BrokenPipe" in said[0] or "ConnectionReset" in said[0]
    sender.close()
    assert len(said) == 1


def test_a_sidecar_that_never_listens_is_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    sender = sender_to(str(tmp_path / "nowhere"), said, connect_seconds=0.3)
    assert sender.put(parcel(1000))
    eventually(lambda: bool(said))
    assert said[0].startswith("no sidecar listened within 0.3 s")
    assert not sender.put(parcel(1000))
    sender.close()


def test_a_sidecar_that_has_gone_with_its_folder_is_not_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    sender = sender_to(str(tmp_path / "gone" / "s"), said)
    eventually(lambda: bool(said))
    assert said == ["the sidecar has ended"]
    sender.close()


def test_a_run_shorter_than_the_sidecars_start_is_recorded(tmp_path: Path) -> None:
    sender = sender_to(str(tmp_path / "s"), [])
    sender.put(parcel(10))
    sender.put(Parcel(frames=lambda: [{"k": "bye"}], size=10, must=True))
    closing = threading.Thread(target=sender.close)
    closing.start()
    late = Server(tmp_path / "s")
    assert [frame["k"] for frame in frames_from(late.accept(), "bye")] == ["hello", "tensor", "bye"]
    closing.join()
    late.close()


def test_a_sidecar_that_comes_late_gets_everything(tmp_path: Path) -> None:
    sender = sender_to(str(tmp_path / "s"), [])
    for number in range(3):
        assert sender.put(parcel(10, number))
    late = Server(tmp_path / "s")
    link = late.accept()
    sender.put(Parcel(frames=lambda: [{"k": "bye"}], size=10, must=True))
    assert [frame["k"] for frame in frames_from(link, "bye")] == ["hello", *["tensor"] * 3, "bye"]
    sender.close()
    late.close()


def test_a_frame_that_cannot_be_encoded_is_left_out(server: Server) -> None:
    said: list[str] = []
    sender = sender_to(server.path, said)
    link = server.accept()
    sender.put(Parcel(frames=lambda: [{"k": "tensor", "data": object()}], size=10))
    sender.put(Parcel(frames=lambda: [{"k": "bye"}], size=10, must=True))
    assert [frame["k"] for frame in frames_from(link, "bye")] == ["hello", "bye"]
    assert len(said) == 1 and said[0].startswith("a frame is left out")
    sender.close()


def test_what_follows_a_frame_that_cannot_be_encoded_is_sent_at_the_end(server: Server) -> None:
    said: list[str] = []
    sender = sender_to(server.path, said)
    link = server.accept()
    held = threading.Event()

    def slow() -> list[Any]:
        held.wait(10)
        return [{"k": "tensor", "data": object()}]

    for _ in range(2):
        sender.put(Parcel(frames=slow, size=10))
    sender.put(Parcel(frames=lambda: [{"k": "bye"}], size=10, must=True))
    closing = threading.Thread(target=sender.close)
    closing.start()
    held.set()
    assert [frame["k"] for frame in frames_from(link, "bye")] == ["hello", "bye"]
    closing.join()
    assert sender.dropped == (0, 0)


def test_what_is_left_out_before_counts_as_dropped(server: Server) -> None:
    sender = sender_to(server.path, [])
    link = server.accept()
    sender.count(100)
    sender.put(Parcel(frames=lambda: [{"k": "bye"}], size=10, must=True))
    found = frames_from(link, "bye")
    assert [frame for frame in found if frame["k"] == "dropped"] == [
        {"k": "dropped", "frames": 1, "bytes": 100}
    ]
    sender.close()


def test_what_the_end_of_a_run_cannot_send_counts_as_dropped(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mt_megatron.scope.watch.sender.CLOSE_SECONDS", 0.2)
    said: list[str] = []
    sender = sender_to(server.path, said)
    link = server.accept()
    for number in range(4):
        assert sender.put(parcel(MIB, number))
    eventually(lambda: sender.waiting == 3 * MIB)
    sender.close()
    frames, size = sender.dropped
    # Of the first the socket has taken a part.
    assert frames == 4 and 3 * MIB < size < 4 * MIB + 1000
    assert said == [] and sender.waiting == 0
    link.close()


def test_an_end_is_told_to_who_asked_for_it(server: Server) -> None:
    said: list[str] = []
    ends: list[str] = []
    sender = sender_to(server.path, said, ended=ends.append)
    server.accept().close()
    eventually(lambda: bool(ends))
    assert len(ends) == 1 and said == []
    sender.close()


def test_files_of_high_numbers_are_waited_for(server: Server) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"at most {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = []
    try:
        while not held or held[-1] <= 1100:
            held.append(os.open(os.devnull, os.O_RDONLY))
        sender = sender_to(server.path, [])
        link = server.accept()
        assert link.fileno() > 1024 and sender.put(parcel(10))
        sender.put(Parcel(frames=lambda: [{"k": "bye"}], size=10, must=True))
        assert [frame["k"] for frame in frames_from(link, "bye")] == ["hello", "tensor", "bye"]
        sender.close()
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
