"""Clients that are slow, silent or deaf: cut off in time, and in nobody's way."""

from __future__ import annotations

import contextlib
import gzip
import socket

import psutil
import pytest

from mt_megatron.host.peers import MOST_CONNECTIONS
from mt_megatron.scope.web import connection
from tests.scope.sidecar.fake_ranks import until
from tests.scope.web.support import Served


def test_slow_clients_take_no_place_for_long(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than there is room for, silent or a byte at a time; they are cut off, and the page is
    there for the others."""
    monkeypatch.setattr(connection, "REQUEST_S", 3600.0)
    with contextlib.ExitStack() as stack:
        slow = slow_clients(page, stack)
        # A control: without a deadline they keep their own user out.
        until(lambda: is_refused(page))
        # A place or two may still have been taken by the connections that asked for a session before.
        assert sum(still_open(link) for link in slow) >= MOST_CONNECTIONS - 3
    until(lambda: not is_refused(page))
    # Longer than a busy machine takes to open them all.
    monkeypatch.setattr(connection, "REQUEST_S", 2.0)
    with contextlib.ExitStack() as stack:
        slow = slow_clients(page, stack)

        def drips() -> bool:
            with contextlib.suppress(OSError):
                slow[9].sendall(b"X")
            return not still_open(slow[9])

        until(drips)  # further bytes do not put the end off
        until(lambda: not any(still_open(link) for link in slow))
        monkeypatch.setattr(connection, "REQUEST_S", 10.0)
        assert page.ask("/api/run", session=page.enter()).status == 200


def is_refused(page: Served) -> bool:
    try:
        return page.ask("/").status != 200
    except ConnectionResetError:
        return True


def slow_clients(page: Served, stack: contextlib.ExitStack) -> list[socket.socket]:
    """As many as there is room for: silent ones, and ones in the middle of a head or of a body."""
    session = page.enter()
    # The server may not have heard yet that connections of before are over; each would take a place.
    until(lambda: links_of(page) == 0)
    to = f"Host: 127.0.0.1:{page.port}\r\nOrigin: {page.origin}\r\nX-Scope-Session: {session}\r\n"
    head = f"GET /api/run HTTP/1.1\r\n{to}X-".encode()
    body = (
        f"POST /api/control HTTP/1.1\r\n{to}Content-Type: application/json\r\n"
        f"X-Scope-Control: {page.tokens.control}\r\nContent-Length: 100\r\n\r\n["
    ).encode()
    inside = [connected(page, stack, body) for _ in range(8)]
    # A request whose head is read when all places are taken is refused: these come before the others.
    assert page.ask("/").status == 200
    until(lambda: links_of(page) == len(inside))
    said = [(b"", head)[number % 2] for number in range(MOST_CONNECTIONS - len(inside))]
    return [*inside, *(connected(page, stack, each) for each in said)]


def links_of(page: Served) -> int:
    """Connections that the server holds open."""
    links = psutil.Process().net_connections(kind="inet")
    return sum(each.laddr.port == page.port and bool(each.raddr) for each in links)


def test_answer_that_nobody_reads_is_given_up(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests one after another on a connection that is never read: one answer waits, and not for ever."""
    monkeypatch.setattr(connection, "ANSWER_S", 0.5)
    session = page.enter()
    ask = (
        f"GET /assets/page.js HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nX-Scope-Session: {session}\r\n\r\n"
    ).encode()
    with contextlib.ExitStack() as stack:
        frozen = connected(page, stack, ask * 200)
        port = frozen.getsockname()[1]

        def serves() -> bool:
            links = psutil.Process().net_connections(kind="inet")
            return any(
                each.laddr.port == page.port and each.raddr and each.raddr.port == port for each in links
            )

        until(lambda: not serves(), 30)
        # A control: all was asked for, and a client that reads gets it.
        whole = page.ask("/assets/page.js", session=session)
        assert whole.status == 200 and whole.header("content-encoding") == "gzip"
        assert len(whole.body) > 50_000 and len(gzip.decompress(whole.body)) > 200_000


def connected(page: Served, stack: contextlib.ExitStack, said: bytes) -> socket.socket:
    """A connection with a small window that has ``said`` something."""
    link = stack.enter_context(socket.socket())
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.settimeout(10)
    link.connect(("127.0.0.1", page.port))
    with contextlib.suppress(ConnectionError):  # cut off already, where this thread was held up
        link.sendall(said)
    return link


def still_open(link: socket.socket) -> bool:
    """Whether the server has not closed it; what it said is read."""
    link.setblocking(False)
    try:
        while link.recv(65536):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
