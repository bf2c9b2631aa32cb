"""Connections from processes of this machine: whose they are, and a bound for those of other users.

Any user of a machine can connect to a port of loopback, keep connections open in silence and flood it with
requests. The kernel knows which user has the socket at the other end. A ``Listener`` gives the user that it
runs as, and root (``sshd`` and others that forward ports), places of their own; all other users, and other
machines, share a bounded part, and are accepted at a bounded rate.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

from .bounds import Rate, Recent

MOST_CONNECTIONS = 128
"""Connections of one listener: of its own user, and of root, each."""

MOST_OF_OTHERS, MOST_OF_ANOTHER = 32, 8
"""Of all other users and machines together, and of each of them: a browser opens six, and a websocket."""

OTHERS_PER_S, OTHERS_BURST = 20.0, 60.0
"""Connections, and requests without a session, of one other user or machine."""

REQUEST_S = 10.0
"""From connecting, or from the first byte of a request, until all of it is there."""

BACKLOG = socket.SOMAXCONN
"""Connections that wait to be accepted: refusing one is quick, so a long queue is a short wait."""

Address = tuple[Any, ...]
"""Host and port, and what else the family has, as ``socket`` gives them."""

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _TCP_LISTEN = 4, 20, 10  # linux/netlink.h, sock_diag.h, tcp_states.h
_QUESTION = struct.Struct("=IHHII 4BI 2s2s16s16s 12s")
"""``nlmsghdr``; ``inet_diag_req_v2`` with the ports and hosts of a socket, any interface and cookie."""

_ANSWER = struct.Struct("=16x xB62x II")
"""``nlmsghdr``; of ``inet_diag_msg`` state, user and inode."""


def uid_of_peer(peer: Address, own: Address) -> int | None:
    """The user who has the socket at ``peer`` that is connected to ``own``, as this end of the connection
    names both. None where no process of this machine holds it open; it may have closed it."""
    ends = []
    for host, port, *_ in (peer, own):
        found = ipaddress.ip_address(str(host).partition("%")[0])
        # The kernel keeps a connection by IPv4 to a socket of IPv6 among those of IPv4.
        ends.append(((getattr(found, "ipv4_mapped", None) or found).packed, int(port)))
    state, uid, inode = _by_netlink(*ends)
    if not state and not _by_netlink(*reversed(ends))[0]:  # this end is there: no answer is no netlink
        state, uid, inode = _by_table(*ends)
    # Of a socket that no process holds the kernel says 0 for both, which is not root's.
    return uid if inode and state != _TCP_LISTEN else None


def is_loopback(address: str) -> bool:
    """True where only this machine reaches ``address``, an IP address or ``localhost``."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(address)
        return bool((getattr(found, "ipv4_mapped", None) or found).is_loopback)
    return address.lower() == "localhost"


def _by_netlink(peer: tuple[bytes, int], own: tuple[bytes, int]) -> tuple[int, ...]:
    """State, user and inode; zeros where the kernel knows none, or has no NETLINK_SOCK_DIAG, as in some
    sandboxes. One question for one socket (sock_diag(7)): the whole table costs 100 ms after a flood."""
    family = socket.AF_INET if len(peer[0]) == 4 else socket.AF_INET6
    head = _QUESTION.size, _SOCK_DIAG_BY_FAMILY, 1, 0, 0, family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF
    ports = (port.to_bytes(2, "big") for _, port in (peer, own))
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel,
    ):
        kernel.send(_QUESTION.pack(*head, *ports, peer[0], own[0], bytes(4) + b"\xff" * 8))
        answer = kernel.recv(4096)
        if struct.unpack_from("=4xH", answer)[0] == _SOCK_DIAG_BY_FAMILY:
            return _ANSWER.unpack_from(answer)
    return 0, 0, 0


def _by_table(peer: tuple[bytes, int], own: tuple[bytes, int]) -> tuple[int, ...]:
    """As ``_by_netlink``, by /proc/net/tcp and tcp6 (proc(5))."""
    for table, size in (("tcp", 4), ("tcp6", 16)):
        hosts = (bytes(10) + b"\xff\xff" + host for host, _ in (peer, own))  # IPv4 as mapped into IPv6
        words = (struct.unpack(f"={size // 4}I", host[-size:]) for host in hosts)
        shown = ("".join(f"{each:08X}" for each in host) for host in words)
        name = " ".join(f"{host}:{port:04X}" for host, (_, port) in zip(shown, (peer, own), strict=True))
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
            columns = file.read().partition(f": {name} ")[2].split(maxsplit=7)
            if columns:
                return int(columns[0], 16), int(columns[4]), int(columns[6])
    return 0, 0, 0


class Listener(socket.socket):
    """A socket that listens, without blocking; ``accept`` refuses, by a reset, connections for which the user
    or machine at the other end (the *holder*) has no place or no rate left. For one thread or event loop."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.setblocking(False)
        self._held: WeakKeyDictionary[socket.socket, tuple[Hashable, Address, float]] = WeakKeyDictionary()
        self._rates: Recent[Hashable, Rate] = Recent(MOST_CONNECTIONS)
        self._favoured = {os.geteuid(), 0}

    def accept(self) -> tuple[socket.socket, Address]:
        """As of ``socket``; refused connections are skipped. Raises ``ConnectionAbortedError`` after so many
        of them that an event loop should look at its other sockets."""
        for _ in range(MOST_CONNECTIONS):
            link, address = super().accept()
            holder: Hashable = None
            with contextlib.suppress(OSError):  # the other end has reset it
                holder = uid_of_peer(link.getpeername(), link.getsockname())
            holder = str(address[0]) if holder is None else holder
            if self._takes(holder) and self._has_place(holder):
                self._held[link] = holder, address[:2], time.monotonic()
                return link, address
            # A reset leaves no entry in the kernel's table, which the flood would fill.
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.close()
        raise ConnectionAbortedError("refused: other users have no place or no rate left")

    def takes(self, address: Address | None) -> bool:
        """True where the holder of the open connection from ``address`` has rate left for a request without a
        session; the user of this process and root always have."""
        found = (holder for holder, its, _ in self._open().values() if address and its == tuple(address[:2]))
        return self._takes(next(found, None))

    def cut_off(self, seconds: float = REQUEST_S) -> None:
        """End connections that are older than ``seconds``, for both ends."""
        for link, (_, _, since) in self._open().items():
            if since <= time.monotonic() - seconds:
                with contextlib.suppress(OSError):  # the other end was first
                    link.shutdown(socket.SHUT_RDWR)

    def _takes(self, holder: Hashable) -> bool:
        rate = self._rates.get(holder) or Rate(OTHERS_PER_S, OTHERS_BURST)
        self._rates.put(holder, rate)
        return holder in self._favoured or rate.take()

    def _has_place(self, holder: Hashable) -> bool:
        held = Counter(each for each, _, _ in self._open().values())
        if holder in self._favoured:
            return held[holder] < MOST_CONNECTIONS
        others = held.total() - sum(held[each] for each in self._favoured)
        return held[holder] < MOST_OF_ANOTHER and others < MOST_OF_OTHERS

    def _open(self) -> dict[socket.socket, tuple[Hashable, Address, float]]:
        return {link: each for link, each in self._held.items() if link.fileno() >= 0}
