"""The listening side: one loopback socket, uvicorn, the token file, the line that says how to open it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from mt_megatron.errors import ConfigError
from mt_megatron.host.peers import BACKLOG, Listener, is_loopback

from .access import TokenFile, link_at, new_ticket, read_token_file, write_secret, write_token_file
from .app import Site, application
from .connection import Connection
from .messages import MOST_BYTES

LOOPBACK = "127.0.0.1"

HEADER_BYTES = 16 * 1024

PING_S = 20.0
"""A browser that answers no ping of the websocket for as long again is disconnected."""

START_S = 10.0


def loopback_socket(port: int, address: str = LOOPBACK) -> tuple[Listener, str]:
    """A listening socket and what is to be said of it: a port that is taken is replaced by a free one.

    Raises ``ConfigError`` for an address that is not loopback, and where no port can be had.
    """
    if not is_loopback(address):
        raise ConfigError(
            f"found {address} as the page's address; it listens on loopback only. From another machine, "
            f"forward the port: ssh -L {port or 7861}:127.0.0.1:{port or 7861} HOST"
        )
    if not 0 <= port < 65_536:
        raise ConfigError(f"found port {port} for the page; expected 0 (any free one) to 65535")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    said = ""
    for number in dict.fromkeys((port, 0)):
        found = Listener(family)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((address, number))
            found.listen(BACKLOG)
            return found, said
        except OSError as error:
            found.close()
            said = f"port {port} could not be had ({error.strerror or error}); another was taken"
            last = error
    raise ConfigError(
        f"no port on {address} can be had for the page: {last}. Free one, or use --scope record"
    )


class Page:
    """A server of ``site``; listens from its making on, answers while ``run`` runs."""

    def __init__(
        self, site: Site, *, port: int = 0, address: str = LOOPBACK, token_file: Path | None = None
    ) -> None:
        """Raises ``ConfigError`` as ``loopback_socket``, and ``OSError`` where the token file cannot be
        written."""
        self.site = site
        self._socket, self.note = loopback_socket(port, address)
        self.port: int = self._socket.getsockname()[1]
        self._token_file = token_file
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            if token_file is not None:
                access = site.access
                tokens = TokenFile(
                    host=socket.gethostname(),
                    port=self.port,
                    pid=os.getpid(),
                    view=access.view,
                    control=access.control,
                )
                write_token_file(token_file, tokens)
        except BaseException:
            self._socket.close()
            raise

    def url(self, *, controls: bool = False) -> str:
        """A new one-time link; with control of the training where it ``controls``."""
        access = self.site.access
        ticket = new_ticket(access.control if controls else access.view, controls=controls)
        return link_at(self.port, ticket)

    def write_address(self, path: Path, *, controls: bool = False) -> None:
        """Replace ``path``, mode 0600, by a new one-time link. Raises ``OSError``."""
        write_secret(path, self.url(controls=controls) + "\n")

    def line(self, run: str, *, live: bool = True, controls: bool = False) -> str:
        """What listens where, and how to open it: of a training by a command, as its log is read by many;
        of a recording by the link itself."""
        note = f" ({self.note})" if self.note else ""
        if not live:
            # A command finds a page by its token file alone.
            again = f" (for another link: mt-megatron scope open {run})" if self._token_file else ""
            return (
                f"scope: the page listens on 127.0.0.1:{self.port}, loopback only{note}; open within two "
                f"minutes, once: {self.url(controls=controls)}{again}; Ctrl-C ends it"
            )
        return (
            f"scope: the live page listens on 127.0.0.1:{self.port}, loopback only{note}; open it with "
            f"'mt-megatron scope open {run}', from elsewhere after "
            f"'ssh -L {self.port}:127.0.0.1:{self.port} {socket.gethostname()}'"
        )

    async def run(self) -> None:
        """Answer until ``close`` or cancellation."""
        config = uvicorn.Config(
            application(self.site, self._socket.takes),
            backlog=BACKLOG,
            loop="asyncio",
            http=Connection,
            ws="websockets",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEADER_BYTES,
            ws_max_size=MOST_BYTES,
            ws_max_queue=8,
            ws_ping_interval=PING_S,
            ws_ping_timeout=PING_S,
            ws_per_message_deflate=False,
        )
        # This implementation answers pings and bounds messages in all versions that the extra allows.
        warnings.filterwarnings("ignore", message=r"[^\n]*websockets")
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        logging.getLogger("websockets").setLevel(logging.CRITICAL)
        self._loop = asyncio.get_running_loop()
        self._server = _Server(config)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._forget()

    def start(self) -> None:
        """``run`` in a thread of its own; returns once it answers. Raises ``ConfigError`` if it does not."""
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.run()), name="mt-megatron-scope-page", daemon=True
        )
        self._thread.start()
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._server is not None and self._server.started:
                return
            if not self._thread.is_alive():
                break
            time.sleep(0.005)
        raise ConfigError("the page's server did not start; the log of the process says why")

    def close(self) -> None:
        """Stop listening and take the token file away."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(5)
        self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
        path, self._token_file = self._token_file, None
        if path is not None:
            # Another server of the run may have replaced the file: the next attempt's, while this one ends.
            with contextlib.suppress(OSError, ConfigError):
                if read_token_file(path).view == self.site.access.view:
                    path.unlink()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process that this server is a part of."""
        yield
