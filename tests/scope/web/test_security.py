"""Nothing but a browser that was let in, on this machine, by this page, sees or does anything."""

from __future__ import annotations

import base64
import gzip
import json
import os
import stat
import time
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mt_megatron.errors import ConfigError, ScopeError
from mt_megatron.host.peers import is_loopback
from mt_megatron.scope.web.access import (
    TICKET_S,
    Access,
    link_to,
    new_ticket,
    proof_of,
    read_token_file,
    write_secret,
    write_token_file,
)
from mt_megatron.scope.web.messages import COMMANDS, MOST_BYTES
from mt_megatron.scope.web.server import loopback_socket
from mt_megatron.scope.web.views.registry import DATA
from tests.scope.web.support import Served

# Who may look.


def test_shows_nothing_of_a_run_without_a_session(page: Served) -> None:
    paths = ("/api/run", "/api/server", "/api/runs", "/api/tile?tensor=x&step=1", "/nothing", "/page.json")
    for path in paths:
        assert page.ask(path).status == 401, path
        assert page.ask(path, session="wrong").status == 401, path
    session = page.enter()
    assert page.ask("/api/run", session=session).status == 200
    # The same secret under another name, or given twice, is none; the files of the build are no secret.
    assert page.ask("/api/run", x_scope_control=session).status == 401
    head = f"GET /api/run HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n" + f"X-Scope-Session: {session}\r\n" * 2
    assert b" 401 " in page.raw(f"{head}\r\n".encode(), answers=True).splitlines()[0]
    for path in ("/", "/open", "/assets/page.js"):
        bare = page.ask(path)
        assert bare.status == 200 and bare.body == page.ask(path, session=session).body, path


def test_ticket_opens_once_and_not_when_wrong_or_late(page: Served) -> None:
    ticket = new_ticket(page.tokens.view)
    first = page.redeem(ticket)
    assert first.status == 200 and len(first.json()["session"]) >= 43 and first.json()["control"] is None
    second = page.redeem(ticket)
    assert second.status == 403 and b"used" in second.body and "session" not in second.json()
    late = new_ticket(page.tokens.view, time.time() - TICKET_S - 1)
    early = new_ticket(page.tokens.view, time.time() + 60)
    changed = new_ticket(page.tokens.view)
    changed = changed[:-2] + ("AA" if changed[-2:] != "AA" else "BB")
    raised = base64.urlsafe_b64decode(new_ticket(page.tokens.view))
    raised = base64.urlsafe_b64encode(raised[:24] + b"\1" + raised[25:]).decode()
    swapped = new_ticket(page.tokens.view, controls=True), new_ticket(page.tokens.control)
    others = (late, early, changed, raised, *swapped, new_ticket("another token"), "", "%00", "a" * 400)
    for ticket in others:
        reply = page.redeem(ticket)
        assert reply.status in (400, 403) and "session" not in reply.json(), ticket
    for body in (
        {},
        [],
        {"ticket": 1},
        {"ticket": [new_ticket(page.tokens.view)]},
        {"ticket": None, "more": 1},
    ):
        assert page.post("/api/open", body, None).status == 400, body
    # Another page that a browser has open posts none, and a link that is only looked at is not used up.
    assert page.post("/api/open", {"ticket": new_ticket(page.tokens.view)}, None, origin=None).status == 403
    link = link_to(page.tokens)
    address, _, ticket = link.removeprefix(page.origin).partition("#ticket=")
    assert address == "/open" and page.ask(address).status == page.ask(address).status == 200
    assert page.redeem(ticket).status == 200


def test_link_with_control_hands_the_control_token_to_its_tab(page: Served) -> None:
    ticket = link_to(page.tokens, controls=True).partition("#ticket=")[2]
    reply = page.redeem(ticket).json()
    assert reply["control"] == page.tokens.control and page.redeem(ticket).status == 403
    assert page.tokens.control not in ticket
    # The same rules as for a token that was typed: a session alone commands nothing.
    assert page.post("/api/command", {"do": "status"}, reply["session"]).status == 403
    good = page.post("/api/command", {"do": "pause"}, reply["session"], control=reply["control"])
    assert good.status == 200 and [frame["do"] for frame in page.commands] == ["pause"]
    rows = [(row["what"], row.get("controls")) for row in page.audit()]
    assert ("opened", True) in rows and ("command", None) in rows


def test_no_secret_is_a_cookie(page: Served) -> None:
    """A browser sends the cookies of 127.0.0.1 to every port there, also to another user's server."""
    session = page.enter()
    for path in ("/", "/open", "/assets/page.js", "/api/run", "/api/proof?challenge=x"):
        assert not page.ask(path, session=session).header("set-cookie"), path
    assert not page.redeem(new_ticket(page.tokens.view)).header("set-cookie")
    for name in ("session", "x-scope-session", f"mt_scope_{page.port}"):
        assert page.ask("/api/run", cookie=f"{name}={session}").status == 401
    script = gzip.decompress(page.ask("/assets/page.js").body).decode()
    assert "sessionStorage" in script and "document.cookie" not in script


def test_server_proves_that_it_has_the_view_token(page: Served) -> None:
    reply = page.ask("/api/proof?challenge=abc")
    assert reply.status == 200 and reply.body.decode() == proof_of(page.tokens.view, "abc")
    assert (
        proof_of("another", "abc") != proof_of(page.tokens.view, "abc") != proof_of(page.tokens.view, "abd")
    )
    for query in ("", "?challenge=" + "a" * 101, "?challenge=a&more=1", "?challenge="):
        assert page.ask(f"/api/proof{query}").status == (200 if query.endswith("=") else 400), query


def test_session_ends(page: Served) -> None:
    now = [1e9]
    access = Access(clock=lambda: now[0])
    found = access.redeem(new_ticket(access.view, now[0]))
    assert not isinstance(found, str)
    assert not isinstance(access.session(found[0]), str)
    now[0] += 12 * 3600 + 1
    assert access.has_ended(found[1])
    assert access.session(found[0]) == "expired session"
    assert access.session(found[0]) == "unknown session"
    # Used all the time, it ends after a week.
    found = access.redeem(new_ticket(access.view, now[0]))
    assert not isinstance(found, str)
    for _ in range(7 * 24):
        now[0] += 3600
        assert not isinstance(access.session(found[0]), str)
    now[0] += 3600
    assert access.session(found[0]) == "expired session"
    # And when the browser says so.
    session = page.enter()
    assert page.post("/api/leave", {}, session).status == 200
    assert page.ask("/api/run", session=session).status == 401


def test_token_file_is_private(page: Served, tmp_path: Path) -> None:
    path = page.run / "scope" / "page.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    row = json.loads(path.read_text())
    assert len(row["view"]) >= 43 and len(row["control"]) >= 43 and row["view"] != row["control"]
    assert not any(row["view"] in line or row["control"] in line for line in page.said)
    umask = os.umask(0)
    try:
        write_token_file(tmp_path / "page.json", page.tokens)
        write_secret(tmp_path / "link", "x")
    finally:
        os.umask(umask)
    for name in ("page.json", "link"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert read_token_file(tmp_path / "page.json") == page.tokens
    (tmp_path / "page.json").chmod(0o644)
    with pytest.raises(ConfigError, match="0644"):
        read_token_file(tmp_path / "page.json")
    (tmp_path / "link2").symlink_to(path)
    with pytest.raises(ConfigError):
        read_token_file(tmp_path / "link2")


# Where requests come from.


def test_refuses_foreign_hosts(page: Served) -> None:
    """DNS rebinding: another name that points here."""
    session = page.enter()
    evil = (
        "evil.example",
        f"evil.example:{page.port}",
        f"127.0.0.1.evil.example:{page.port}",
        f"localhost.evil.example:{page.port}",
        "127.0.0.1@evil.example",
        "0.0.0.0",
        "",
        None,
    )
    for host in evil:
        for path in ("/", "/api/run", "/open", "/api/proof?challenge=x"):
            reply = page.ask(path, session=session, host=host)
            assert reply.status in (400, 421), (host, path, reply.status)
        reply = page.post("/api/open", {"ticket": new_ticket(page.tokens.view)}, None, host=host)
        assert reply.status in (400, 403, 421), (host, reply.status)
    for host in (
        "evil.localhost",
        f"localhost.evil:{page.port}",
        f"localhost.:{page.port}",
        f"[::1].evil.example:{page.port}",
        "[::ffff:127.0.0.1]",
        "::1",
        "[fe80::1]",
        "2130706433",
        "0x7f.1",
        "127.1",
        f"127.0.0.1:{page.port}:80",
        "127.0.0.1:port",
        "127.0.0.1:999999",
        f"127.0.0.1:{page.port} evil.example",
    ):
        assert page.ask("/api/run", session=session, host=host).status in (400, 421), host
    # A control: this machine by its other names, and by the port that ssh -L has elsewhere.
    for host in (f"localhost:{page.port}", "LOCALHOST", f"[::1]:{page.port}", "127.0.0.1:9999"):
        assert page.ask("/", session=session, host=host).status == 200, host


def test_refuses_foreign_origins(page: Served) -> None:
    session = page.enter()
    for origin in (
        "http://evil.example",
        "null",
        "",
        "file://",
        "http://127.0.0.1",
        f"http://[::1]:{page.port}",
        f"{page.origin}/",
        f"{page.origin}@evil.example",
        f"https://127.0.0.1:{page.port}",
        f"http://127.0.0.1:{page.port + 1}",
        f"http://localhost:{page.port}",
        f"{page.origin}.evil.example",
    ):
        assert page.ask("/api/run", session=session, origin=origin).status == 403, origin
        control = page.tokens.control
        reply = page.post("/api/control", {}, session, control=control, origin=origin)
        assert reply.status == 403, origin
        with pytest.raises(InvalidStatus), page.connect(session, origin):
            pass
    reply = page.post("/api/control", {}, session, control=page.tokens.control, origin=None)
    assert reply.status == 403
    for site in ("cross-site", "same-site"):
        assert page.ask("/api/run", session=session, sec_fetch_site=site).status == 403
    # A control: the page's own are taken.
    assert (
        page.ask("/api/run", session=session, origin=page.origin, sec_fetch_site="same-origin").status == 200
    )
    with pytest.raises(InvalidStatus), page.connect(session, None):
        pass  # without an origin
    for first in (None, '{"do":"ping"}', "{}", b"x", '{"do":"session","token":"wrong"}', '{"do":"session"}'):
        with page.connect(None) as link:
            page.publish({"k": "step", "step": 1})
            if first is not None:
                link.send(first)
                with pytest.raises(ConnectionClosed) as closed:
                    link.recv(timeout=10)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008, first
            else:
                with pytest.raises(TimeoutError):
                    link.recv(timeout=0.5)


def test_listens_on_loopback_only(page: Served) -> None:
    own = [
        each.laddr.ip
        for each in psutil.Process().net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == page.port
    ]
    assert own == ["127.0.0.1"]
    for address in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(ConfigError, match="loopback"):
            loopback_socket(0, address)
    assert is_loopback("::1") and is_loopback("127.3.2.1") and is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("::ffff:8.8.8.8") and not is_loopback("127.0.0.1.evil.example")


def test_taken_port_is_replaced_and_told(page: Served) -> None:
    found, said = loopback_socket(page.port)
    with found:
        assert found.getsockname()[1] != page.port
        assert str(page.port) in said


# What may be asked.


def test_serves_no_file_but_the_build(page: Served) -> None:
    session = page.enter()
    for path in (
        "/../pyproject.toml",
        "/assets/../../app.py",
        "/assets/..%2f..%2fapp.py",
        "/assets/%2e%2e/app.py",
        "/assets/%252e%252e%252fapp.py",
        "/assets/%c0%ae%c0%ae/app.py",
        "/assets/..;/app.py",
        "/%2fetc%2fpasswd",
        "/assets/page.js%00.html",
        f"http://127.0.0.1:{page.port}/assets/page.js",
        "/assets/....//app.py",
        "/assets//etc/passwd",
        "//etc/passwd",
        "/etc/passwd",
        "/assets/..\\app.py",
        "/source.json",
        "/page.json",
        "/scope/page.json",
        "/api/../page.json",
        "/" + "a" * 5_000,
    ):
        reply = page.ask(path, session=session)
        assert reply.status in (400, 404), path
        assert page.tokens.view.encode() not in reply.body and b"root:" not in reply.body
    for name in (
        "../page",
        "/etc",
        "..",
        ".",
        "run/../..",
        "page",
        "..%2fother",
        "%252e%252e",
        "other/scope",
    ):
        assert page.ask(f"/api/run?run={name}", session=session).status == 404, name
    assert page.ask("/api/run?run=other", session=session).status == 200


def test_answers_keep_browsers_from_running_or_framing_anything_else(page: Served) -> None:
    session = page.enter()
    for path in ("/", "/assets/page.js", "/api/run", "/nothing", "/open"):
        reply = page.ask(path, session=session)
        policy = reply.header("content-security-policy")
        assert "default-src 'none'" in policy and "script-src 'self'" in policy, path
        assert "unsafe" not in policy and "http" not in policy and "frame-ancestors 'none'" in policy
        assert reply.header("x-content-type-options") == "nosniff"
        assert reply.header("referrer-policy") == "no-referrer"
        assert not reply.header("access-control-allow-origin")
        assert not reply.header("server")
    assert page.ask("/", method="OPTIONS", session=session, origin=page.origin).status == 405
    assert page.ask("/", method="TRACE", session=session, origin=page.origin).status == 405


def test_refuses_what_is_too_large(page: Served) -> None:
    session = page.enter()
    control = page.tokens.control
    assert page.post("/api/control", b"[" * (MOST_BYTES + 1), session, control=control).status == 413
    reply = page.post("/api/control", b"", session, control=control, content_length=str(10**12))
    assert reply.status == 413
    # In pieces, without a length.
    head = (
        f"POST /api/command HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nOrigin: {page.origin}\r\n"
        f"X-Scope-Session: {session}\r\nContent-Type: application/json\r\nX-Scope-Control: {control}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    piece = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    assert b" 413 " in page.raw(head + piece * 12 + b"0\r\n\r\n", answers=True).splitlines()[0]
    assert page.ask("/api/run?" + "a" * 3_000, session=session).status == 414
    many = page.raw(b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n")
    assert many == b"" or b" 400 " in many.splitlines()[0] or b" 431 " in many.splitlines()[0]
    with page.connect(session) as link:
        link.send("x" * (MOST_BYTES * 2))
        with pytest.raises(ConnectionClosed):
            link.recv(timeout=10)
    assert page.ask("/api/run", session=session).status == 200


def test_texts_reach_no_statement_of_sql(page: Served) -> None:
    """Texts that would change or tell more if they became part of one name nothing, and change nothing."""
    session = page.enter()
    files = {path: path.read_bytes() for path in sorted((page.run / "scope").glob("*.sqlite"))}
    assert files
    good = "path=decoder.layers.1&statistic=activation_rms"
    assert page.ask(f"/api/series?{good}", session=session).status == 200
    for text in (
        "x' OR '1'='1",
        "decoder.layers.1' --",
        "'; DROP TABLE value; --",
        "decoder.layers.1' UNION SELECT text, text, text FROM path --",
        "decoder.layers.%",
        "decoder.layers._",
        'x" OR 1=1 --',
        ":e",
        "?",
    ):
        said = quote(text)
        for query in (
            f"series?path={said}&statistic=activation_rms",
            f"series?path=decoder.layers.1&statistic={said}",
            f"vectors?path={said}&statistic=expert_load",
            f"tile?tensor={said}&step=20",
            f"summary?tensor=activation%40{said}&step=20",
            f"tokens?step=20&path={said}",
            f"run?run={said}",
        ):
            assert page.ask(f"/api/{query}", session=session).status in (400, 404), query
        empty = page.ask(f"/api/thumbs?step=20&what={said}", session=session)
        assert empty.status == 200 and empty.unpacked()[0]["rows"] == []
    assert files == {path: path.read_bytes() for path in sorted((page.run / "scope").glob("*.sqlite"))}
    assert page.ask(f"/api/series?{good}", session=session).status == 200


# Who may command.


def test_websocket_takes_no_command(page: Served) -> None:
    """Of a session that may only look, and of one that has given the control token."""
    for controls in (False, True):
        session = page.enter()
        if controls:
            assert page.post("/api/control", {}, session, control=page.tokens.control).status == 200
        for do in COMMANDS:
            for message in (
                {"do": do},
                {"do": do, "arguments": {}},
                {"do": do, "control": page.tokens.control},
                {"k": "command", "id": "1", "do": do, "arguments": {}},
            ):
                with page.connect(session) as link:
                    link.send(json.dumps(message))
                    with pytest.raises(ConnectionClosed) as closed:
                        link.recv(timeout=10)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008, message
    assert page.commands == []


def test_websocket_ends_with_its_session(page: Served) -> None:
    session, other = page.enter(), page.enter()
    with page.connect(session) as link, page.connect(other) as stays:
        page.publish({"k": "step", "step": 1})
        assert json.loads(link.recv(timeout=10))["step"] == json.loads(stays.recv(timeout=10))["step"] == 1
        assert page.post("/api/leave", {}, session).status == 200
        page.publish({"k": "step", "step": 2})
        with pytest.raises(ConnectionClosed):
            link.recv(timeout=10)
        assert json.loads(stays.recv(timeout=10))["step"] == 2
    with pytest.raises(ConnectionClosed), page.connect(session):
        pass
    with page.connect(other) as link:
        # Where nothing happens either, as in a pause.
        assert page.post("/api/leave", {}, other).status == 200
        with pytest.raises(ConnectionClosed):
            link.recv(timeout=10)


def test_a_recording_that_cannot_be_read_is_said(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: object) -> None:
        raise ScopeError("the file is locked; end a long 'scope sql' first")

    monkeypatch.setitem(DATA, "run", locked)
    reply = page.ask("/api/run", session=page.enter())
    assert reply.status == 503 and reply.json()["error"].startswith("the file is locked")


def test_session_alone_commands_nothing(page: Served) -> None:
    session = page.enter()
    before = len(page.commands)
    for control in (None, "", "wrong", page.tokens.view, page.tokens.control[:-1]):
        for do in COMMANDS:
            reply = page.post("/api/command", {"do": do}, session, control=control)
            assert reply.status in (403, 429)
        assert page.post("/api/bookmark", {"step": 1, "text": "x"}, session, control=control).status in (
            403,
            429,
        )
    assert page.ask("/api/command", session=session).status in (404, 405)
    assert len(page.commands) == before
    mine = page.enter()
    assert page.post("/api/control", {}, mine, control=page.tokens.control).status == 200
    reply = page.post("/api/command", {"do": "pause"}, mine, control=page.tokens.control)
    assert reply.status == 200 and reply.json()["ok"], reply.body
    assert [frame["do"] for frame in page.commands[before:]] == ["pause"]
    for do in ("status", "hold"):
        reply = page.post("/api/command", {"do": do}, mine, control=page.tokens.control)
        assert reply.status == 200 and reply.json()["ok"], do
    # A form of another page cannot be JSON.
    reply = page.post(
        "/api/command", {"do": "pause"}, mine, control=page.tokens.control, content_type="text/plain"
    )
    assert reply.status == 400
    whats = [row["what"] for row in page.audit()]
    assert "opened" in whats and "refused" in whats and "command" in whats and "result" in whats
    assert not {"status", "hold"}.intersection(row.get("do") for row in page.audit())
    text = json.dumps(page.audit())
    assert page.tokens.control not in text and page.tokens.view not in text


def test_commands_are_checked_before_they_are_sent(page: Served) -> None:
    before = len(page.commands)
    wrong: list[object] = [
        {"do": "exec", "arguments": {}},
        {"do": "step", "arguments": {"n": 0}},
        {"do": "step", "arguments": {"n": True}},
        {"do": "step", "arguments": {"n": "1"}},
        {"do": "step", "arguments": {"n": 1, "more": 1}},
        {"do": "pause", "arguments": []},
        {"do": "generate", "arguments": {}},
        {"do": "generate", "arguments": {"prompt": "x", "ids": [1]}},
        {"do": "generate", "arguments": {"prompt": "x\x00"}},
        {"do": "generate", "arguments": {"ids": [2**40]}},
        {"do": "generate", "arguments": {"prompt": "x", "temperature": -1}},
        {"do": "arm"},
        {"do": "arm", "arguments": {"perturbation": "os.system"}},
        {
            "do": "arm",
            "arguments": {"perturbation": {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}}},
        },
        {"do": "request", "arguments": {"texts": ["nothing@**"]}},
        {"do": "request", "arguments": {"texts": ["attention@layers"] * 65}},
        {"do": "pause", "extra": 1},
        [],
        7,
        None,
    ]
    session = page.enter()
    for number, value in enumerate(wrong):
        if number % 12 == 0:
            session = page.enter()  # each session has a rate of its own
        reply = page.post("/api/command", value, session, control=page.tokens.control)
        assert reply.status == 400, (value, reply.status, reply.body)
    for body in (b'{"do":"pause","do":"resume"}', b'{"do":NaN}', b"{", b"\xff\xfe", b"[" * 30_000):
        reply = page.post("/api/command", body, page.enter(), control=page.tokens.control)
        assert reply.status == 400, body[:20]
    assert len(page.commands) == before


def test_floods_are_bounded(page: Served) -> None:
    session = page.enter()
    found = [
        page.post("/api/command", {"do": "status"}, session, control=page.tokens.control).status
        for _ in range(40)
    ]
    assert 429 in found and found[0] == 200
    with page.connect(page.enter()) as link, pytest.raises(ConnectionClosed):
        for _ in range(5_000):
            link.send('{"do":"ping"}')
        link.recv(timeout=10)
    sizes = (page.run / "scope" / "audit.jsonl").stat().st_size
    assert sizes < 2**20
