"""Messages of any kind at all: refused, and nothing breaks."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable

import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from mt_megatron.scope.web import app
from mt_megatron.scope.web.messages import COMMANDS, QUERIES
from tests.scope.web.support import Served
from tests.second_lane import DAILY

PARTS, FUZZED = (10, 10_000) if os.environ.get("MT_MEGATRON_SOAK") else (1, 2_000 if DAILY else 1_000)
"""Tests, and messages of each."""


def _value(draw: random.Random, depth: int = 0) -> object:
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return draw.choice([None, True, False])
    if kind == 1:
        return draw.choice([0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**70), draw.randrange(1000)])
    if kind == 2:
        return draw.choice([0.5, -1e300, 1e308, 1e-320])
    if kind in (3, 4, 5):
        return "".join(
            chr(draw.choice([0, 7, 34, 46, 47, 60, 92, 65, 0x4E2D, 0x1F600, 0xD800]))
            for _ in range(draw.randrange(12))
        )
    if kind == 6:
        return [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    keys = [
        "do",
        "arguments",
        "n",
        "prompt",
        "perturbation",
        "texts",
        "id",
        "kinds",
        "__proto__",
        "",
        "step",
        "text",
    ]
    return {draw.choice(keys): _value(draw, depth + 1) for _ in range(draw.randrange(4))}


def _nearly_right(draw: random.Random) -> object:
    """A command with one field that it cannot have."""
    do = draw.choice([name for name, fields in COMMANDS.items() if fields])
    wrong = draw.choice(
        [[None], {"a": {"\x00": 1}}, True, "\x00", -1, -0.5, 2**80, float("nan"), float("inf")]
    )
    return {"do": do, "arguments": {draw.choice(list(COMMANDS[do])): wrong}}


@pytest.mark.parametrize("part", range(PARTS))
def test_fuzzed_messages_are_refused_and_break_nothing(
    part: int, page: Served, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Bodies, queries, raw bytes and websocket messages. The first lane sends 1,000, both
    together 2,000, the soak ten times 10,000."""
    begin = time.monotonic()
    memory = psutil.Process().memory_info().rss
    # What is refused for its number alone is not looked at.
    monkeypatch.setattr(app, "COMMANDS_BURST", 1e9)
    draw = random.Random(20 + part)
    site_commands = len(page.commands)
    served_before = page.ask("/api/run", session=page.enter()).status
    assert served_before == 200
    counts: dict[str, dict[int, int]] = {}
    session, uses = page.enter(), 0
    for number in range(FUZZED):
        if uses >= 300:  # below a session's burst
            session, uses = page.enter(), 0
        way = number % 10
        if way < 5:
            kind = "query"
            name = draw.choice([*QUERIES, "x", "server", "runs"])
            fields = [*QUERIES.get(name, {}), "run", "zz"]
            pairs = "&".join(f"{draw.choice(fields)}={_text(draw)}" for _ in range(draw.randrange(4)))
            status = page.ask(f"/api/{name}?{pairs}", session=session).status
            uses += 1
            assert status in (200, 400, 404, 414, 429), (name, pairs, status)
        elif way < 8:
            kind = "body"
            value = _nearly_right(draw) if way == 5 else _value(draw)
            body = json.dumps(value).encode() if way < 7 else draw.randbytes(draw.randrange(200))
            path = draw.choice(["/api/command", "/api/bookmark", "/api/control", "/api/leave2", "/live"])
            if way == 5:
                path = "/api/command"
            # The control token's own route looks at no body; to others half of the messages have it.
            gives = path not in ("/api/control",) and draw.random() < 0.5
            control = page.tokens.control if gives else draw.choice([None, "x"])
            status = page.post(path, body, session, control=control).status
            uses += 1
            # A random message may be a bookmark as a browser sends it.
            accepted = (200,) if gives and path == "/api/bookmark" and _is_bookmark(body) else ()
            assert status in (400, 403, 404, 405, 429, *accepted), (path, body, status)
        elif way == 8 and number % 50 == 8:
            kind = "raw bytes"
            line = draw.choice(
                [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n\r\n", draw.randbytes(40)]
            )
            answer = page.raw(line + draw.randbytes(draw.randrange(100)) + b"\r\n\r\n")
            status = int(answer.split()[1]) if answer[:5] == b"HTTP/" else 0
            assert status == 0 or 400 <= status < 500
        else:
            kind = "websocket"
            said = draw.choice([json.dumps(_value(draw)), draw.randbytes(20), "", "{}", '{"do":"x"}'])
            with page.connect(session) as link:
                link.send(said)
                with pytest.raises(ConnectionClosed) as closed:
                    link.recv(timeout=20)
            uses += 1
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008, (said, closed.value)
            status = 1008
        of = counts.setdefault(kind, {})
        of[status] = of.get(status, 0) + 1
    record_property("messages", sum(sum(of.values()) for of in counts.values()))
    for kind, of in counts.items():
        record_property(kind, {str(status): of[status] for status in sorted(of)})
    record_property("commands that reached a rank", len(page.commands) - site_commands)
    record_property("memory grew by MiB", round((psutil.Process().memory_info().rss - memory) / 2**20, 1))
    record_property("seconds", round(time.monotonic() - begin, 1))
    assert not any(of.get(500) for of in counts.values()) and len(page.commands) == site_commands
    assert counts["query"].get(400, 0) > FUZZED // 10 and counts["body"].get(400, 0) > FUZZED // 20
    # It still does what it is there for.
    assert page.ask("/api/run", session=page.enter()).status == 200
    with page.connect(page.enter()) as again:
        page.publish({"k": "step", "step": 7})
        assert json.loads(again.recv(timeout=10))["step"] == 7


def _is_bookmark(body: bytes) -> bool:
    try:
        value = json.loads(body)
    except ValueError:
        return False
    if not isinstance(value, dict) or value.keys() != {"step", "text"}:
        return False
    step, text = value["step"], value["text"]
    return type(step) is int and step >= 0 and isinstance(text, str) and text.isprintable()


def _text(draw: random.Random) -> str:
    values = [
        "0",
        "-1",
        "1e9",
        "999999999999999999999",
        "",
        "..%2f",
        "%00",
        "x",
        "NaN",
        "1",
        "decoder",
        "%ff",
        "max",
        "20",
        "attention",
    ]
    return draw.choice(values)
