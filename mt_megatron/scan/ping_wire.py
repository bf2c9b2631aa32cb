"""Pings over a socket: four timestamps an exchange, answered by a thread that needs the right token first."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from mt_megatron.scan.records import PING

TOKEN_BYTES = 32
_QUESTION = struct.Struct("<Q")
_ANSWER = struct.Struct("<qq")
_PATIENCE = 0.5
_LONGEST_VISIT = 5.0
_PAUSE = 0.0003

Now = Callable[[], int]
"""The clock that is pinged: ns."""


class PingServer:
    """Answers pings at ``address`` until it is closed; one asker at a time, each for at most five seconds.

    Whoever does not send the token first is cut off. Nothing that arrives is ever interpreted.
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
            self._socket.settimeout(_PATIENCE)
        except OSError:
            self._socket.close()
            raise
        self.address: str = address
        self.port: int = self._socket.getsockname()[1]
        self._closed = threading.Event()
        self._visited = 0.0
        self._thread = threading.Thread(target=self._serve, name="scan-ping-answers", daemon=True)
        self._thread.start()

    def linger(self, *, quiet: float, at_most: float) -> None:
        """Wait until nobody has come for ``quiet`` seconds, ``at_most`` seconds."""
        begun = time.monotonic()
        while time.monotonic() < min(begun + at_most, max(begun, self._visited) + quiet):
            time.sleep(min(quiet / 10, 0.02))

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
        with contextlib.suppress(OSError):
            # Wakes the thread that waits for somebody to come.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                visitor, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with visitor, contextlib.suppress(OSError):
                self._answer(visitor)
            self._visited = time.monotonic()

    def _answer(self, visitor: socket.socket) -> None:
        until = time.monotonic() + _LONGEST_VISIT
        visitor.settimeout(_PATIENCE)
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_receive(visitor, TOKEN_BYTES), self._token):
            return
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
