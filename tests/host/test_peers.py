"""The user at the other end of a connection is known; other users' connections take a part of the places."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mt_megatron.host import peers
from mt_megatron.host.peers import MOST_CONNECTIONS, MOST_OF_ANOTHER, MOST_OF_OTHERS, Listener, uid_of_peer

OTHER = 65534
CLIENT = """
import os, socket, sys
"localhost".encode("idna")  # a module that the other user may not be able to read
os.setuid(int(sys.argv[1]))
link = socket.create_connection((sys.argv[2], int(sys.argv[3])))
print("there", flush=True)
sys.stdin.readline()
link.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[Listener]:
    with Listener(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        if host == "::":
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind((host, 0))
        found.listen(peers.BACKLOG)
        yield found


def accepted(listener: Listener, seconds: float = 10.0) -> tuple[socket.socket, Any]:
    until = time.monotonic() + seconds
    while True:
        try:
            return listener.accept()
        except BlockingIOError:
            assert time.monotonic() < until
            time.sleep(0.005)


def ends(link: socket.socket) -> list[tuple[bytes, int]]:
    hosts = [ipaddress.ip_address(each[0]) for each in (link.getpeername(), link.getsockname())]
    packed = [(getattr(each, "ipv4_mapped", None) or each).packed for each in hosts]
    return list(zip(packed, (link.getpeername()[1], link.getsockname()[1]), strict=True))


@pytest.mark.parametrize("host,to", [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_own_user_is_known_by_both_of_the_kernels_answers(host: str, to: str) -> None:
    with listening(host) as listener, socket.create_connection((to, listener.getsockname()[1])) as client:
        link, _ = accepted(listener)
        with link:
            assert uid_of_peer(link.getpeername(), link.getsockname()) == os.geteuid()
            assert peers._by_table(*ends(link))[1] == os.geteuid()
            assert peers._by_netlink(*ends(link)) in (peers._by_table(*ends(link)), (0, 0, 0))
            client.close()
            assert uid_of_peer(link.getpeername(), link.getsockname()) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="expected root, which may become another user")
def test_another_user_is_known_and_not_root_after_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    for by in (peers._by_netlink, lambda *_: (0, 0, 0)):
        monkeypatch.setattr(peers, "_by_netlink", by)
        with listening() as listener:
            words = [
                sys.executable,
                "-I",
                "-c",
                CLIENT,
                str(OTHER),
                "127.0.0.1",
                str(listener.getsockname()[1]),
            ]
            with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdin is not None and client.stdout is not None
                assert client.stdout.readline() == "there\n"
                link, _ = accepted(listener)
                assert uid_of_peer(link.getpeername(), link.getsockname()) == OTHER
                client.stdin.write("\n")
                client.stdin.flush()
                assert client.stdout.readline() == "closed\n"
                # The kernel says user 0 of a socket that nobody holds.
                assert uid_of_peer(link.getpeername(), link.getsockname()) is None
                client.stdin.write("\n")
                link.close()


class Crowd:
    """Clients whose users are as ``uids`` says, by the address that they connect from."""

    def __init__(self, listener: Listener, stack: contextlib.ExitStack) -> None:
        self._listener = listener
        self._stack = stack

    def comes(self, source: str) -> socket.socket | None:
        """What the server accepts of one more client; None where it is refused."""
        client = self._stack.enter_context(socket.socket())
        client.bind((source, 0))
        client.connect(self._listener.getsockname())
        try:
            return self._stack.enter_context(accepted(self._listener, 0.0)[0])
        except AssertionError:
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            return None


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    """127.0.0.1 is this user, 127.0.0.2 root, 127.0.0.N user N."""
    uids = {"127.0.0.1": os.geteuid(), "127.0.0.2": 0}

    def uid(peer: tuple[str, int], own: tuple[str, int]) -> int:
        return uids.get(peer[0], int(peer[0].rpartition(".")[2]))

    monkeypatch.setattr(peers, "uid_of_peer", uid)
    monkeypatch.setattr(peers, "OTHERS_BURST", 1e6)
    with listening() as listener, contextlib.ExitStack() as stack:
        yield Crowd(listener, stack)


def test_other_users_share_a_part_and_keep_nobody_out(crowd: Crowd) -> None:
    for user in range(3, 3 + MOST_OF_OTHERS // MOST_OF_ANOTHER):
        links = [crowd.comes(f"127.0.0.{user}") for _ in range(MOST_OF_ANOTHER + 5)]
        assert [link is not None for link in links] == [True] * MOST_OF_ANOTHER + [False] * 5
    assert crowd.comes("127.0.0.99") is None
    mine = [crowd.comes("127.0.0.1") for _ in range(MOST_CONNECTIONS - 1)]
    roots = [crowd.comes("127.0.0.2") for _ in range(1)]
    assert None not in mine and None not in roots
    # A place is free again once its connection is closed.
    last = links[0]
    assert last is not None
    last.close()
    assert crowd.comes("127.0.0.99") is not None and crowd.comes("127.0.0.99") is None


def test_other_users_come_at_a_bounded_rate(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "OTHERS_BURST", 3.0)
    monkeypatch.setattr(peers, "OTHERS_PER_S", 0.0)
    for source, count in (("127.0.0.5", 3), ("127.0.0.6", 3), ("127.0.0.1", 6)):
        came = 0
        for _ in range(6):
            link = crowd.comes(source)
            if link is not None:
                came += 1
                # A request without a session takes of the same rate.
                taken = crowd._listener.takes(link.getpeername())
                assert taken is (source == "127.0.0.1" or came < 2)
                link.close()
        assert came == (2 if count == 3 else 6), source


def test_connections_end_after_their_time(crowd: Crowd) -> None:
    old = crowd.comes("127.0.0.1")
    assert old is not None
    time.sleep(0.05)
    new = crowd.comes("127.0.0.1")
    assert new is not None
    crowd._listener.cut_off(0.05)
    old.settimeout(0.1)
    new.settimeout(0.1)
    assert old.recv(1) == b""
    with pytest.raises(TimeoutError):
        new.recv(1)


def test_a_flood_of_refused_ones_gives_the_loop_its_turn(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "OTHERS_BURST", 0.0)
    monkeypatch.setattr(peers, "MOST_CONNECTIONS", 4)
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            client = stack.enter_context(socket.socket())
            client.bind(("127.0.0.7", 0))
            client.connect(crowd._listener.getsockname())
        with pytest.raises(ConnectionAbortedError):
            crowd._listener.accept()
        with pytest.raises(BlockingIOError):
            crowd._listener.accept()
