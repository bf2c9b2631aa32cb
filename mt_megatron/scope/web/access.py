"""Who may look and who may command: tokens in a private file, one-time links, sessions that expire.

The view token never travels: a *ticket* is made of it (time, random number, HMAC-SHA256) by whoever may read
the file, opens the page once, within ``TICKET_S``, and is exchanged for a session's token. The browser's tab
keeps that token and sends it as a header: a cookie of 127.0.0.1 would go to every port there, also to another
user's. The control token is a second secret that is sent with each command; a session alone commands
nothing. A ticket made of the control token hands it to the tab.

A link is given after the server has answered a challenge by the view token (``proof_of``): another process
may have its port by now.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mt_megatron.errors import ConfigError
from mt_megatron.host.bounds import Rate

TOKEN_BYTES = 32

TICKET_S = 120.0
"""A link opens for so long after it was made."""

CLOCK_S = 5.0
"""A ticket may come from a clock that is so much ahead: one machine's clocks that are read apart."""

SESSION_S = 12 * 3600.0
"""A session ends so long after its last request."""

LONGEST_SESSION_S = 7 * 24 * 3600.0
"""And so long after its first one."""

MOST_SESSIONS = 32
"""At a time; the one used longest ago ends for a new one."""

REQUESTS_PER_S, BURST = 200.0, 400.0
"""Of one session."""

_HEAD = struct.Struct("<d16s?")
"""Time of making, random number, True for a ticket that hands over control."""


def new_token() -> str:
    """256 random bits as text."""
    return secrets.token_urlsafe(TOKEN_BYTES)


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """What ``write_token_file`` keeps for the command line: where the page is and both tokens."""

    host: str
    """The machine's name, for ``ssh -L``."""

    port: int
    pid: int
    view: str
    control: str


def write_token_file(path: Path, tokens: TokenFile) -> None:
    """Replace ``path``, mode 0600 from its first byte on. Raises ``OSError``."""
    write_secret(path, json.dumps(vars(tokens)))


def write_secret(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, mode 0600 from its first byte on. Raises ``OSError``."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp: 0600, O_EXCL
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read_token_file(path: Path) -> TokenFile:
    """Raises ``ConfigError`` where the file is missing, damaged or readable by others than its owner."""
    try:
        with open(path, encoding="utf-8", opener=lambda p, f: os.open(p, f | os.O_NOFOLLOW)) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    f"found mode {mode:04o} of {path}; expected 0600: others can read the page's tokens. "
                    "Remove it and start the run again, or see a recording with 'scope open RUN --here'"
                )
            row = json.load(file)
        found = TokenFile(**row)
        if not (isinstance(found.port, int) and isinstance(found.view, str) and found.view):
            raise ValueError("port or view is missing")
        return found
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"found no readable page of a run in {path} ({error}); expected the file that a run with "
            "--scope live keeps while it trains"
        ) from None


def new_ticket(token: str, now: float | None = None, *, controls: bool = False) -> str:
    """A text that opens the page once. ``token``: the view token, or the control token where the ticket
    ``controls``."""
    head = _HEAD.pack(time.time() if now is None else now, secrets.token_bytes(16), controls)
    return base64.urlsafe_b64encode(head + _mac(token, head)).decode().rstrip("=")


def link_to(tokens: TokenFile, *, controls: bool = False) -> str:
    """A link that opens the page of ``tokens`` once, for ``TICKET_S`` seconds; with control of the training
    where it ``controls``."""
    return link_at(tokens.port, new_ticket(tokens.control if controls else tokens.view, controls=controls))


def link_at(port: int, ticket: str) -> str:
    """The address that opens the page with ``ticket``, in the part that a browser keeps to itself: the page
    posts it."""
    return f"http://127.0.0.1:{port}/open#ticket={ticket}"


def proof_of(view_token: str, challenge: str) -> str:
    """A server's answer to ``challenge``, which shows that it has ``view_token``."""
    return hmac.new(view_token.encode(), f"mt-scope server\0{challenge}".encode(), hashlib.sha256).hexdigest()


@dataclass
class Session:
    """One tab of a browser."""

    name: str
    """For the audit log; nothing can be opened with it."""

    began: float
    used: float
    ended: bool = False
    rate: Rate = field(default_factory=lambda: Rate(REQUESTS_PER_S, BURST))


class Access:
    """Tickets, sessions and the control token of one server. Times are seconds of ``clock``, the wall
    clock's."""

    def __init__(
        self,
        *,
        view: str | None = None,
        control: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.view = view or new_token()
        self.control = control or new_token()
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[bytes, float] = {}
        self._sessions: dict[bytes, Session] = {}

    def redeem(self, ticket: str) -> tuple[str, Session, bool] | str:
        """Token and session for ``ticket`` and whether it hands over control, or why it opens nothing."""
        try:
            body = base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4))
        except ValueError:
            body = b""
        head, mac = body[: _HEAD.size], body[_HEAD.size :]
        with self._lock:
            if len(head) < _HEAD.size:
                return "wrong ticket"
            made, number, controls = _HEAD.unpack(head)
            if not hmac.compare_digest(mac, _mac(self.control if controls else self.view, head)):
                return "wrong ticket"
            now = self._clock()
            if not made - CLOCK_S <= now <= made + TICKET_S:
                return "expired ticket"
            if number in self._used:
                return "used ticket"
            self._used = {each: until for each, until in self._used.items() if until > now}
            self._used[number] = made + TICKET_S
            token = new_token()
            session = Session(name=secrets.token_hex(4), began=now, used=now)
            if len(self._sessions) >= MOST_SESSIONS:
                self._end(min(self._sessions, key=lambda key: self._sessions[key].used))
            self._sessions[_digest(token)] = session
            return token, session, controls

    def session(self, token: str | None) -> Session | str:
        """The session of ``token``, or why there is none."""
        if not token:
            return "no session"
        with self._lock:
            key = _digest(token)  # looked up by digest: the time it takes says nothing of the cookie
            found = self._sessions.get(key)
            if found is None:
                return "unknown session"
            if self._is_late(found):
                self._end(key)
                return "expired session"
            found.used = self._clock()
            return found

    def has_ended(self, session: Session) -> bool:
        """Whether ``session`` was ended, or is too old: a websocket outlives the request that opened it."""
        with self._lock:
            return session.ended or self._is_late(session)

    def controls(self, token: str) -> bool:
        """Whether ``token`` is the control token."""
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self.control.encode())

    def end(self, token: str) -> None:
        """End the session of ``token``."""
        with self._lock:
            self._end(_digest(token))

    def _end(self, key: bytes) -> None:
        found = self._sessions.pop(key, None)
        if found is not None:
            found.ended = True

    def _is_late(self, session: Session) -> bool:
        now = self._clock()
        return now > session.used + SESSION_S or now > session.began + LONGEST_SESSION_S


def _mac(token: str, head: bytes) -> bytes:
    return hmac.new(token.encode(), b"mt-scope ticket\0" + head, hashlib.sha256).digest()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
