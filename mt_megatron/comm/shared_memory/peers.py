"""Connections between ranks of one machine: they pass the rings' descriptors and show when a peer is gone.

Each rank listens on an abstract Unix socket, which has no file, under a random name that it publishes through
the bootstrap; the lower rank of a pair connects. The kernel says who is at the other end (user, process): a
process of another user is refused. A connection's end and, where the kernel offers it, a pidfd show the death
of a peer even if a child of it still holds the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Set
from typing import Any

from mt_megatron.comm.bootstrap import Bootstrap, Place, own_place
from mt_megatron.comm.errors import PeerLost, TransferTimeout, TransportUnavailable
from mt_megatron.comm.transport import Edge

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77
_POLLRDHUP = getattr(select, "POLLRDHUP", 0x2000)
_MOST_BYTES = 4096
_HELLO_SECONDS = 5.0
"""For the first words of a connection, which come right behind it."""

_CHECK_SECONDS = 0.05
"""Between two looks at a peer, where somebody asks all the time."""

_WAIT_SECONDS = 0.5
"""Between two looks whether a rank that has not connected yet has given up."""

_ENDED = "its process ended before it connected"

_FAREWELLS = {
    "close": "it closed its channels while this rank still used them",
    "abandon": "it gave up its channels after an error of its own",
}


def _seen(message: dict[str, Any]) -> str:
    """End of a peer by its last words."""
    seen = _FAREWELLS.get(str(message.get("farewell")), "its process ended or its connection broke")
    return f"{seen} ({message['said']})" if message.get("said") else seen


class Peer:
    """The process at the other end, and the connection to it."""

    def __init__(self, place: Place, connection: socket.socket) -> None:
        self.place = place
        self._connection = connection
        self._pidfd = _pidfd(connection)
        self._lock = threading.Lock()
        self._looked = 0.0
        self._lost: str | None = None
        self._poll = select.poll()
        self._poll.register(connection, _POLLRDHUP)
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)

    def check(self, *, now: bool = False) -> None:
        """Raise PeerLost if the peer is gone. Looks at most every 0.05 s, or ``now``."""
        if self._lost is None:
            moment = time.monotonic()
            if not now and moment - self._looked < _CHECK_SECONDS:
                return
            self._looked = moment
            with self._lock:
                if self._lost is None and self._poll.poll(0):
                    self._lost = self._why()
        if self._lost is not None:
            raise PeerLost(self.place.rank, self.place.host, self.place.pid, self._lost)

    def _why(self) -> str:
        message: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            while data := self._connection.recv(_MOST_BYTES, socket.MSG_DONTWAIT):
                found = json.loads(data)
                message = found if "farewell" in found else message
        return _seen(message)

    def send(self, message: dict[str, Any], descriptors: Collection[int] = ()) -> None:
        """Raises PeerLost if the connection is broken."""
        try:
            socket.send_fds(self._connection, [json.dumps(message).encode()], list(descriptors))
        except OSError as error:
            self._looked = 0.0
            self.check(now=True)
            raise PeerLost(self.place.rank, self.place.host, self.place.pid, str(error)) from error

    def receive(self, deadline: float) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors. Raises PeerLost and TransferTimeout."""
        while True:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if self._pidfd is not None:
                poll.register(self._pidfd, select.POLLIN)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    f"rank {self.place.rank} (process {self.place.pid} on {self.place.host}) did not send "
                    "the memory of a channel in time; see what that process says"
                )
            if not poll.poll(1000 * left):
                continue
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._connection, _MOST_BYTES, 4, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                self.check(now=True)
                continue
            except ConnectionError:
                data, descriptors = b"", []
            message = json.loads(data) if data else {"farewell": "ended"}
            if "farewell" in message:
                self._lost = _seen(message)
                raise PeerLost(self.place.rank, self.place.host, self.place.pid, self._lost)
            return message, descriptors

    def leave(self, farewell: str, said: str | None) -> None:
        """Close the connection; ``farewell``: a key of ``_FAREWELLS``, ``said``: the error behind it. Again:
        nothing."""
        with contextlib.suppress(OSError):
            message = json.dumps({"farewell": farewell, "said": said}).encode()
            self._connection.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        with self._lock:
            self._lost = self._lost or "this rank closed its channels"
            self._connection.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def drop(self) -> None:
        """Close this process's descriptors after a fork: another thread may have held the lock."""
        self._connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)


class Peers:
    """This rank's connections, by global rank."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.own = own_place(bootstrap.rank)
        self._bootstrap = bootstrap
        self._connected: dict[int, Peer] = {}
        name = f"\0mt_megatron/{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(name)
        self._listener.listen(4096)
        self._listener.setblocking(False)
        bootstrap.publish(f"place/{self.own.rank}", self.own.encode())
        bootstrap.publish(f"socket/{self.own.rank}", name[1:].encode())

    def connect(self, ranks: Collection[int], deadline: float) -> None:
        """Be connected to ``ranks``, which call this with this rank. Raises TransportUnavailable for a rank
        that shared memory does not reach, TransferTimeout and PeerLost."""
        missing = sorted(set(ranks) - self._connected.keys())
        places = {rank: self._place(rank, deadline) for rank in missing}
        for rank in missing:
            why = out_of_reach(self.own, places[rank])
            if why is not None:
                raise TransportUnavailable("shm", why, "use --p2p-transport auto, rdma or collective")
        for rank in missing:
            if rank > self.own.rank:
                name = self._bootstrap.fetch(f"socket/{rank}", _left(deadline)).decode()
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
                try:
                    connection.connect(f"\0{name}")
                    _require_own_user(connection)
                    connection.send(json.dumps({"rank": self.own.rank, "name": name}).encode())
                except OSError as error:
                    connection.close()
                    place = places[rank]
                    raise PeerLost(rank, place.host, place.pid, f"it does not listen: {error}") from error
                self._connected[rank] = Peer(places[rank], connection)
        self._accept({rank for rank in missing if rank < self.own.rank}, places, deadline)

    def _place(self, rank: int, deadline: float) -> Place:
        return Place.decode(self._bootstrap.fetch(f"place/{rank}", _left(deadline)))

    def _accept(self, expected: set[int], places: dict[int, Place], deadline: float) -> None:
        own_name = self._listener.getsockname()[1:].decode()
        while expected - self._connected.keys():
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                self._await_connection(expected - self._connected.keys(), places, deadline)
                continue
            connection.settimeout(_HELLO_SECONDS)
            hello: Any = None
            with contextlib.suppress(OSError, ValueError, TransportUnavailable):
                _require_own_user(connection)
                hello = json.loads(connection.recv(_MOST_BYTES))
            rank = hello.get("rank") if isinstance(hello, dict) and hello.get("name") == own_name else None
            if not isinstance(rank, int) or rank in self._connected:
                connection.close()  # Not one of the job's.
                continue
            connection.settimeout(None)
            # It may be one that this rank has not asked for yet.
            place = places.get(rank) or self._place(rank, deadline)
            self._connected[rank] = Peer(place, connection)

    def _await_connection(self, missing: Set[int], places: dict[int, Place], deadline: float) -> None:
        """Return when somebody connects, or after a while. Raises PeerLost where one of ``missing`` will not,
        and TransferTimeout."""
        if _left(deadline) <= 0:
            raise TransferTimeout(
                f"rank(s) {sorted(missing)} did not connect to rank {self.own.rank} in time; see what their "
                "processes say"
            )
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        watched: dict[int, Place] = {}
        try:
            for rank in sorted(missing):
                place = places[rank]
                if self._gave_up(rank):
                    raise PeerLost(rank, place.host, place.pid, _FAREWELLS["abandon"])
                process = self._process(place)
                if process is not None:
                    watched[process] = place
                    poll.register(process, select.POLLIN)
            ready = [found for found, _ in poll.poll(1000 * min(_left(deadline), _WAIT_SECONDS))]
        finally:
            for process in watched:
                os.close(process)
        if self._listener.fileno() not in ready:
            for place in (watched[process] for process in ready):
                raise PeerLost(place.rank, place.host, place.pid, _ENDED)

    def _gave_up(self, rank: int) -> bool:
        try:
            return bool(self._bootstrap.fetch(f"gave_up/{rank}", 0.0))
        except TransferTimeout:
            return False

    def _process(self, place: Place) -> int | None:
        """A pidfd; None where there is none, or the number is of another PID namespace. Raises PeerLost."""
        if not place.processes or place.processes != self.own.processes:
            return None
        try:
            return os.pidfd_open(place.pid)
        except ProcessLookupError as error:
            raise PeerLost(place.rank, place.host, place.pid, _ENDED) from error
        except (OSError, AttributeError):
            return None

    def __getitem__(self, rank: int) -> Peer:
        return self._connected[rank]

    def close(self, farewell: str, said: str | None = None) -> None:
        """Close all connections; ``farewell``: a key of ``_FAREWELLS``, ``said``: the error behind it."""
        self._listener.close()
        for peer in self._connected.values():
            peer.leave(farewell, said)
        if farewell == "abandon":
            # For ranks that wait for this one to connect. The store may be gone with the rank that serves it.
            with contextlib.suppress(Exception):
                self._bootstrap.publish(f"gave_up/{self.own.rank}", b"true")

    def drop(self) -> None:
        """Close this process's descriptors after a fork."""
        self._listener.close()
        for peer in self._connected.values():
            peer.drop()


def pass_rings(
    peers: Peers,
    own: int,
    edges: Collection[Edge],
    make: Callable[[Edge], int],
    take: Callable[[Edge, int], None],
    facts: dict[str, int],
    deadline: float,
) -> None:
    """Exchange the descriptors of new ``edges``: the receiver of an edge makes its memory.

    ``make(edge)`` returns a descriptor, which is closed here once it is sent; ``take(edge, descriptor)`` owns
    what it is given. ``facts``: the ring's size, which both ends must agree on. At the end each pair of ranks
    knows of both that they are ready, or both raise TransportUnavailable.
    """
    failures: list[TransportUnavailable] = []
    for edge in (each for each in edges if each.target == own):
        try:
            descriptor = make(edge)
        except TransportUnavailable as error:
            failures.append(error)
            peers[edge.source].send({"refused": error.reason})
            continue
        try:
            peers[edge.source].send({"edge": list(edge), **facts}, [descriptor])
        finally:
            os.close(descriptor)
    wanted = {edge for edge in edges if edge.source == own}
    while wanted:
        edge = min(wanted)
        message, descriptors = peers[edge.target].receive(deadline)
        if message.get("edge") in [list(each) for each in wanted]:
            edge = Edge(*message["edge"])
        wanted.discard(edge)
        said = {name: message.get(name) for name in ("edge", *facts)}
        if said == {"edge": list(edge), **facts} and len(descriptors) == 1:
            try:
                take(edge, descriptors[0])
            except TransportUnavailable as error:
                failures.append(error)
            continue
        for each in descriptors:
            os.close(each)
        if "refused" not in message:
            why = f"rank {edge.target} prepared {said}, rank {own} { ({'edge': list(edge), **facts}) }"
            change = "give all ranks the same configuration and edges"
            failures.append(TransportUnavailable("shm", why, change))
    others = {each.target if each.source == own else each.source for each in edges}
    for rank in sorted(others):
        peers[rank].send({"ready": failures[0].reason if failures else ""})
    for rank in sorted(others):
        why = str(peers[rank].receive(deadline)[0].get("ready", "it prepared other edges"))
        if why:
            failures.append(TransportUnavailable("shm", f"rank {rank} says: {why}", _CHANGE))
    if failures:
        raise failures[0]


_CHANGE = "use --p2p-transport auto or collective"


def out_of_reach(own: Place, other: Place) -> str | None:
    """Why shared memory does not connect two ranks; None where it does."""
    if own.boot != other.boot:
        return f"rank {own.rank} runs on {own.host}, rank {other.rank} on {other.host}, another machine"
    if own.network != other.network:
        return f"ranks {own.rank} and {other.rank} run in two containers (network namespaces) of {own.host}"
    if own.user != other.user:
        return f"rank {own.rank} runs as user {own.user}, rank {other.rank} as user {other.user}"
    return None


def _require_own_user(connection: socket.socket) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.getuid():
        raise TransportUnavailable(
            "shm", f"a process of user {user} is at the other end", "run all ranks as one user"
        )


def _pidfd(connection: socket.socket) -> int | None:
    """Readable when the peer's process has ended; None where the kernel has none."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(raw)
    with contextlib.suppress(OSError, AttributeError):
        # 0: a process of another PID namespace.
        return os.pidfd_open(pid) if pid > 0 else None
    return None


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
