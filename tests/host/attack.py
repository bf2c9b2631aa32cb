"""Another local user's attack on HTTP ports: ``python attack.py UID SOURCE SECONDS PORT ...``.

Prints what it did as JSON. Standard library only: its user may read nothing else. UID -1 stays the user that
it is; SOURCE is the address of loopback that it connects from.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

SILENT = 160

Attack = Callable[[int], None]


class Attacker:
    """One process of it."""

    def __init__(self, source: str, seconds: float) -> None:
        self._source = source
        self.until = time.monotonic() + seconds
        self.did: Counter[str] = Counter()

    def over(self) -> bool:
        return time.monotonic() > self.until

    def link(self, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), 2, (self._source, 0))

    def silent(self, port: int) -> None:
        """Connections without a word, more than there are places; those that are ended are made again."""
        held: list[socket.socket] = []
        with selectors.DefaultSelector() as ended:
            while not self.over():
                while len(held) < SILENT and not self.over():
                    with contextlib.suppress(OSError):
                        held.append(self.link(port))
                        ended.register(held[-1], selectors.EVENT_READ)
                        self.did["silent"] += 1
                for key, _ in ended.select(0.05):
                    ended.unregister(key.fileobj)
                    held.remove(key.fileobj)  # type: ignore[arg-type]
                    key.fileobj.close()  # type: ignore[union-attr]
                    self.did["ended"] += 1

    def flood(self, port: int) -> None:
        """Requests without a session, a connection each."""
        paths = ("/api/run", "/metrics", "/", "/assets/page.js", "/api/proof?challenge=x", "/open")
        for number in range(10**9):
            if self.over():
                return
            with contextlib.suppress(OSError), self.link(port) as link:
                link.sendall(self._get(paths[number % len(paths)], port))
                self.did["answered"] += bool(link.recv(65536))
            self.did["flood"] += 1

    def repeat(self, port: int) -> None:
        """Requests without end on a connection, and tickets that are guessed."""
        body = json.dumps({"ticket": "a" * 76})
        ticket = (
            f"POST /api/open HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nOrigin: http://127.0.0.1:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        while not self.over():
            with contextlib.suppress(OSError), self.link(port) as link:
                while not self.over():
                    link.sendall(self._get("/api/run", port) + ticket)
                    if not link.recv(65536):
                        break
                    self.did["repeated"] += 1

    def drip(self, port: int) -> None:
        """Slow loris: a header a byte at a time; and answers that are never read."""
        held: list[socket.socket] = []
        while not self.over():
            while len(held) < 40 and not self.over():
                with contextlib.suppress(OSError):
                    link = self.link(port)
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    held.append(link)
                    link.setblocking(False)
                    deaf = self._get("/assets/page.js", port) * 50
                    link.sendall(deaf if len(held) % 2 else b"GET / HTTP/1.1\r\nX-")
                    self.did["drip"] += 1
            for link in list(held):
                try:
                    link.send(b"X")
                except BlockingIOError:
                    continue
                except OSError:
                    held.remove(link)
                    link.close()
            time.sleep(0.02)

    def half(self, port: int) -> None:
        """Connections that are half closed, reset, or closed at once."""
        for number in range(10**9):
            if self.over():
                return
            with contextlib.suppress(OSError), self.link(port) as link:
                if number % 3 == 0:
                    link.shutdown(socket.SHUT_WR)
                    link.recv(1)
                elif number % 3 == 1:
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.did["half"] += 1

    def huge(self, port: int) -> None:
        """Headers of 10 MiB."""
        line = b"X-%d: " + b"y" * 60_000 + b"\r\n"
        while not self.over():
            with contextlib.suppress(OSError), self.link(port) as link:
                link.sendall(self._get("/", port)[:-2])
                for _ in range(170):
                    link.sendall(line)
                link.recv(1)
            self.did["huge"] += 1

    @staticmethod
    def _get(path: str, port: int) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()


def main() -> None:
    """Attack all ports in all ways at once."""
    uid, source, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if uid >= 0:
        "localhost".encode("idna")  # a module that the other user may not be able to read
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        assert os.getuid() == os.geteuid() == uid
    one = Attacker(source, seconds)
    ways: list[Attack] = [one.silent, one.flood, one.repeat, one.drip, one.half, one.huge]
    threads = [
        threading.Thread(target=way, args=(int(port),), daemon=True) for way in ways for port in sys.argv[4:]
    ]
    for thread in threads:
        thread.start()
    print("begun", flush=True)
    for thread in threads:
        thread.join(max(0.0, one.until - time.monotonic()) + 0.2)
    print(json.dumps(one.did), flush=True)


if __name__ == "__main__":
    main()
