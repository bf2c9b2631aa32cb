"""Pings over a socket: four timestamps an exchange, answered by a thread that needs the right token first.

One thread looks at all who come at once and lets nobody through without the token; another answers those
it let through, one after the other: two at a time would falsify each other's times.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mt_megatron.backends.threads import RankThread
from mt_megatron.scan.format.records import PING

TOKEN_BYTES = 32
_QUESTION = struct.Struct("<Q")
_ANSWER = struct.Struct("<qq")
_PATIENCE = 0.5
"""Seconds for the whole token, and later for each question."""

_LONGEST_VISIT = 5.0
_MOST_UNKNOWN = 64
_PAUSE = 0.0003

Now = Callable[[], int]
"""The clock that is pinged: ns."""


@dataclass(kw_only=True)
class _Unknown:
    """Somebody who has not shown the token yet."""

    until: float
    said: bytearray = field(default_factory=bytearray)


class PingServer:
    """Answers pings at ``address`` until it is closed.

    Whoever does not send the token within half a second, or sends another one, is cut off and keeps nobody
    waiting; of more than 64 who have sent none the first to come goes. Who has sent it is answered for at
    most five seconds. Nothing that arrives is ever interpreted.
    """

    def __init__(self, address: str, token: bytes, *, now: Now = time.perf_counter_ns) -> None:
        """Bind to ``address`` (an IP address of this machine) and a free port. Raises ``OSError``."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._token = token
        self._now = now
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((address, 0))
            self._socket.listen(128)
            self._socket.setblocking(False)
            self._wakes, self._wake = socket.socketpair()
        except OSError:
            self._socket.close()
            raise
        self.address: str = address
        self.port: int = self._socket.getsockname()[1]
        self._closed = threading.Event()
        self._visited = 0.0
        self._known: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._threads = [
            RankThread(target=self._admit, name="scan-ping-visitors", daemon=True),
            RankThread(target=self._serve, name="scan-ping-answers", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def linger(self, *, quiet: float, at_most: float) -> None:
        """Wait until nobody has come for ``quiet`` seconds, ``at_most`` seconds."""
        begun = time.monotonic()
        while time.monotonic() < min(begun + at_most, max(begun, self._visited) + quiet):
            time.sleep(min(quiet / 10, 0.02))

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        for thread in self._threads:
            thread.join(2.0)
        for each in (self._socket, self._wake, self._wakes):
            each.close()

    def _admit(self) -> None:
        unknown: dict[socket.socket, _Unknown] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)

            def leave(visitor: socket.socket, *, close: bool = True) -> None:
                del unknown[visitor]
                selector.unregister(visitor)
                if close:
                    visitor.close()

            try:
                while not self._closed.is_set():
                    # Without visitors nothing wakes this thread.
                    first = min((each.until for each in unknown.values()), default=None)
                    ready = selector.select(None if first is None else max(0.0, first - time.monotonic()))
                    for key, _ in ready:
                        visitor = key.fileobj
                        assert isinstance(visitor, socket.socket)
                        if visitor is self._socket and (come := self._accepted()) is not None:
                            if len(unknown) >= _MOST_UNKNOWN:
                                leave(next(iter(unknown)))
                            unknown[come] = _Unknown(until=time.monotonic() + _PATIENCE)
                            selector.register(come, selectors.EVENT_READ)
                        elif (
                            visitor in unknown
                            and (through := self._shown(visitor, unknown[visitor])) is not None
                        ):
                            leave(visitor, close=not through)
                            if through:
                                self._known.put(visitor)
                    late = [visitor for visitor, each in unknown.items() if each.until <= time.monotonic()]
                    for visitor in late:
                        leave(visitor)
            finally:
                for visitor in list(unknown):
                    visitor.close()
                self._known.put(None)

    def _accepted(self) -> socket.socket | None:
        try:
            visitor, _ = self._socket.accept()
        except BlockingIOError:
            return None
        except OSError:
            # No descriptors left, say: whoever waits goes on waiting, and this thread does not spin.
            self._closed.wait(_PATIENCE)
            return None
        visitor.setblocking(False)
        return visitor

    def _shown(self, visitor: socket.socket, so_far: _Unknown) -> bool | None:
        """Whether the token was the right one; None while some of it is to come."""
        try:
            more = visitor.recv(TOKEN_BYTES - len(so_far.said))
        except BlockingIOError:
            return None
        except OSError:
            return False
        so_far.said += more
        if more and len(so_far.said) < TOKEN_BYTES:
            return None
        return hmac.compare_digest(bytes(so_far.said), self._token)

    def _serve(self) -> None:
        while (visitor := self._known.get()) is not None:
            with visitor, contextlib.suppress(OSError):
                self._answer(visitor)
            self._visited = time.monotonic()

    def _answer(self, visitor: socket.socket) -> None:
        until = time.monotonic() + _LONGEST_VISIT
        visitor.settimeout(_PATIENCE)
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not self._closed.is_set() and time.monotonic() < until:
            question = _receive(visitor, _QUESTION.size)
            received = self._now()
            if len(question) < _QUESTION.size:
                return
            visitor.sendall(_ANSWER.pack(received, self._now()))


def ask(
    address: str, port: int, token: bytes, *, peer: int, count: int, now: Now = time.perf_counter_ns
) -> np.ndarray:
    """``count`` exchanges with the server of rank ``peer``, as ``PING`` records.

    Returns those that were answered when it stops answering. Raises ``OSError`` when it cannot be reached,
    or does not take the token.
    """
    found = np.zeros(count, dtype=PING)
    found["peer"] = peer
    done = 0
    with socket.create_connection((address, port), timeout=2.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(5.0)
        connection.sendall(token)
        for number in range(count):
            sent = now()
            connection.sendall(_QUESTION.pack(number))
            answer = _receive(connection, _ANSWER.size)
            returned = now()
            if len(answer) < _ANSWER.size:
                break
            received, answered = _ANSWER.unpack(answer)
            row = found[done]
            row["sent"], row["received"], row["answered"], row["returned"] = (
                sent,
                received,
                answered,
                returned,
            )
            done += 1
            # The next one meets the machines in another moment.
            time.sleep(_PAUSE)
    if done == 0:
        raise ConnectionError(f"rank {peer} at {address}:{port} answers no pings")
    return found[:done]


def _receive(connection: socket.socket, size: int) -> bytes:
    """``size`` bytes, fewer when the other side leaves or does not get on."""
    data = b""
    while len(data) < size:
        try:
            more = connection.recv(size - len(data))
        except TimeoutError:
            break
        if not more:
            break
        data += more
    return data
