"""Events reach browsers that read; a browser that does not read costs the sidecar a bounded queue."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from mt_megatron.scope.web import live
from mt_megatron.scope.web.live import QUEUE, small
from tests.scope.sidecar.fake_ranks import until
from tests.scope.web.support import Served

EVENTS = 40_000 if os.environ.get("MT_MEGATRON_DAILY") else 6_000


def test_events_come_without_arrays(page: Served) -> None:
    with page.connect(page.enter()) as link:
        time.sleep(0.2)
        page.publish({"k": "tensor", "step": 3, "path": "x", "data": b"secret", "value": float("inf")})
        found = json.loads(link.recv(timeout=10))
        assert found == {"k": "tensor", "step": 3, "path": "x", "value": None}
        link.send('{"do":"kinds","kinds":"step"}')
        until = time.monotonic() + 20
        while True:
            page.publish({"k": "alert", "step": 4})
            page.publish({"k": "step", "step": 5})
            first = json.loads(link.recv(timeout=10))
            if first["step"] == 5:
                break
            # It has not taken the wish yet.
            assert json.loads(link.recv(timeout=10))["step"] == 5 and time.monotonic() < until


def test_a_notice_is_written_once_for_all_browsers(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session, written = page.enter(), []

    def counted(event: Mapping[str, Any]) -> dict[str, Any]:
        written.append(event["step"])
        return small(event)

    monkeypatch.setattr(live, "small", counted)
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(page.connect(session)) for _ in range(3)]
        until(lambda: page.ask("/api/server", session=session).json()["sockets"] == 3)
        for step in range(2 * QUEUE):
            page.publish({"k": "step", "step": step})
            for link in links:
                assert json.loads(link.recv(timeout=20)) == {"k": "step", "step": step}
    assert written == list(range(2 * QUEUE))


def test_state_is_kept_for_browsers_that_come_later(page: Served) -> None:
    value = {"paused": True, "step": 9}
    page.answer({"k": "result", "id": "state", "ok": True, "value": value, "error": None})
    session, until = page.enter(), time.monotonic() + 10
    while page.ask("/api/server", session=session).json()["state"] != value:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_requests_reach_the_file_that_all_sidecars_read(page: Served) -> None:
    texts = ["attention@decoder.layers.*.self_attention:heads=0:every=1"]
    body = {"do": "request", "arguments": {"texts": texts}}
    reply = page.post("/api/command", body, page.enter(), control=page.tokens.control)
    assert reply.status == 200 and reply.json()["ok"], reply.body
    assert json.loads((page.run / "scope" / "requests.json").read_text())["requests"] == texts
    assert reply.json()["value"]["unknown"] == []
    body["arguments"] = {"texts": [*texts, "mlp@decoder.layer.0"]}
    reply = page.post("/api/command", body, page.enter(), control=page.tokens.control)
    (line,) = reply.json()["value"]["unknown"]
    assert reply.json()["ok"] and "found no module 'decoder.layer.0'" in line


def test_bookmarks_are_kept(page: Served) -> None:
    session = page.enter()
    for text, status in (("here", 200), ("x" * 201, 400), ("two\nlines", 400), ("", 400)):
        mark = {"step": 7, "text": text}
        assert page.post("/api/bookmark", mark, session, control=page.tokens.control).status == status
    marks = page.ask("/api/run", session=session).json()["bookmarks"]
    assert {"step": 7, "text": "here"} in marks


def test_browser_that_reads_nothing_costs_a_bounded_queue(page: Served) -> None:
    """Its socket is open and never read; another browser gets everything meanwhile."""
    session = page.enter()
    frozen = websocket_by_hand(page, session)
    text, got = "x" * 3_000, 0
    with frozen, page.connect(page.enter()) as reader:
        time.sleep(0.3)
        subscriptions = list(page.hub._subscriptions)
        memory = psutil.Process().memory_info().rss
        for number in range(EVENTS):
            page.publish({"k": "step", "step": number, "text": text})
            if number % 50 == 49:
                for _ in range(50):
                    assert json.loads(reader.recv(timeout=20))["step"] == got
                    got += 1
        worst = max(subscriptions, key=lambda each: each.dropped)
        assert worst.dropped > EVENTS // 3
        assert all(len(each._events) <= QUEUE + 1 for each in subscriptions)
        assert psutil.Process().memory_info().rss - memory < 64 * 2**20
        assert page.ask("/api/run", session=session).status == 200
    until = time.monotonic() + 20
    while page.ask("/api/server", session=session).json()["browser_dropped"] < worst.dropped:
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["slow", "killed"])
def test_browser_that_reads_slowly_or_dies_costs_no_more(page: Served, how: str) -> None:
    """A few bytes of it at a time, or its end in the middle of a message."""
    session = page.enter()
    link = websocket_by_hand(page, session)
    with link, page.connect(page.enter()) as reader:
        until(lambda: page.ask("/api/server", session=session).json()["sockets"] == 2)
        subscriptions = list(page.hub._subscriptions)
        memory, got = psutil.Process().memory_info().rss, 0
        for number in range(EVENTS):
            page.publish({"k": "step", "step": number, "text": "x" * 3_000})
            if number % 50 == 49:
                if how == "slow":
                    assert link.recv(100)
                elif number == 99:
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    link.close()  # at once, with a reset
                for _ in range(50):
                    assert json.loads(reader.recv(timeout=20))["step"] == got
                    got += 1
        assert all(len(each._events) <= QUEUE + 1 for each in subscriptions)
        assert psutil.Process().memory_info().rss - memory < 64 * 2**20
        if how == "slow":
            assert max(each.dropped for each in subscriptions) > EVENTS // 3
        else:
            until(lambda: page.ask("/api/server", session=session).json()["sockets"] == 1)
    until(lambda: page.ask("/api/server", session=session).json()["sockets"] == 0)


def websocket_by_hand(page: Served, session: str) -> socket.socket:
    """Open, with a small window; nothing of it is read by itself."""
    link = socket.create_connection(("127.0.0.1", page.port))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.settimeout(20)
    link.sendall(
        (
            f"GET /live HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nOrigin: {page.origin}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        ).encode()
    )
    assert b" 101 " in link.recv(4096)
    said = json.dumps({"do": "session", "token": session}).encode()
    link.sendall(bytes([0x81, 0x80 | len(said), 0, 0, 0, 0]) + said)  # one masked frame of text
    return link


def test_notices_are_small() -> None:
    deep: dict[str, object] = {"k": "x"}
    for _ in range(20):
        deep = {"k": "x", "inner": deep}
    assert len(json.dumps(small(deep))) < 200
    assert len(small({"k": "x", "list": list(range(10_000))})["list"]) == 512
    assert small({"k": "x", "data": [1], "function": print}) == {"k": "x"}
