"""Browsers beside a training that ``cost_worker.py`` takes: websocket clients in a process of their own.

As a script (``cost_browsers.py RUN``) it is that process: it opens the page of ``RUN`` as a browser does and
obeys the lines ``join N PACE`` (N clients that take what comes; PACE > 0: a message in so many seconds, in a
small window, beside a download that is never read), ``leave`` and ``die SECONDS`` (by a SIGKILL); each is
answered by a line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

CLIENTS = 4
KINDS = ("reading", "frozen", "slow", "killed")
UNCONNECTED = "no browser, process killed"
"""The process of the clients ends as those that are killed, without a connection: what a process's end costs
on a machine of few cores, whoever it was."""

DYING = (UNCONNECTED, "killed")
_START_SECONDS = 120.0
_SLOW_SECONDS = 0.5
_CLOSE_SECONDS = 0.2
_DOWNLOADS = 50


class Browsers:
    """Clients of one page, of one kind at a time."""

    def __init__(self, run: Path, place: Callable[[int], None] = lambda process: None) -> None:
        """``run``: its sidecar serves a page, soon. ``place``: puts their process on its cores."""
        self._run = run
        self._place = place
        self._is_stopped = False
        self._joined = False
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "cost_browsers.py"), str(self._run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer(process)
        self._place(process.pid)
        return process

    def be(self, kind: str) -> None:
        """End those that are there and open ``CLIENTS`` of ``kind``; of an unknown kind there are none."""
        if self._process.poll() is not None:
            self._joined = False
            self._process = self._started()
        if self._is_stopped:
            self._process.send_signal(signal.SIGCONT)
            self._is_stopped = False
        if self._joined:
            self._tell("leave")
            self._joined = False
        if kind in KINDS:
            self._tell(f"join {CLIENTS} {_SLOW_SECONDS if kind in ('frozen', 'slow') else 0}")
            self._joined = True
        if kind == "frozen":
            self._process.send_signal(signal.SIGSTOP)
            self._is_stopped = True

    def die(self, seconds: float) -> None:
        """They end by a SIGKILL in so many ``seconds``, in the middle of what they do. They send it to
        themselves: a thread of this process would take time from its steps."""
        self._tell(f"die {seconds}")

    def kill(self) -> None:
        """SIGKILL, now."""
        self._process.kill()
        self.wait()

    def wait(self) -> None:
        """Until they have ended."""
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._answer(self._process)

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the clients ended with {process.wait()}")


# The process of the clients.


class _Clients:
    def __init__(self, run: Path) -> None:
        from mt_megatron.errors import ConfigError
        from mt_megatron.scope.web.access import new_ticket, read_token_file

        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                tokens = read_token_file(run / "scope" / "page.json")
                self._port = tokens.port
                link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
                headers = {"Origin": f"http://127.0.0.1:{self._port}", "Content-Type": "application/json"}
                link.request("POST", "/api/open", json.dumps({"ticket": new_ticket(tokens.view)}), headers)
                self._session = json.loads(link.getresponse().read())["session"]
                break
            except (ConfigError, OSError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        self._open = contextlib.ExitStack()

    def join(self, count: int, pace: float) -> None:
        from websockets.sync.client import connect
        from websockets.typing import Origin

        for _ in range(count):
            small = socket.socket()
            if pace:
                small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.connect(("127.0.0.1", self._port))
            link = self._open.enter_context(
                connect(
                    f"ws://127.0.0.1:{self._port}/live",
                    sock=small,
                    origin=Origin(f"http://127.0.0.1:{self._port}"),
                    close_timeout=_CLOSE_SECONDS,
                )
            )
            link.send(json.dumps({"do": "session", "token": self._session}))
            ended = threading.Event()
            self._open.callback(ended.set)
            threading.Thread(target=_take, args=(link, pace, ended), daemon=True).start()
        if pace:
            unread = self._open.enter_context(socket.create_connection(("127.0.0.1", self._port)))
            head = f"Host: 127.0.0.1:{self._port}\r\nX-Scope-Session: {self._session}"
            unread.sendall(f"GET /assets/page.js HTTP/1.1\r\n{head}\r\n\r\n".encode() * _DOWNLOADS)

    def leave(self) -> None:
        self._open.close()


def _take(link: Any, pace: float, ended: threading.Event) -> None:
    from websockets.exceptions import ConnectionClosed

    try:
        while not ended.wait(pace):
            link.recv()
    except ConnectionClosed:
        pass


def main() -> None:
    """Obey the lines of the standard input until it ends."""
    clients = _Clients(Path(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        word, *given = line.split()
        if word == "join":
            clients.join(int(given[0]), float(given[1]))
        elif word == "die":
            threading.Timer(float(given[0]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            clients.leave()
        print("done", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    main()
