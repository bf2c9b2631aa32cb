"""Who may look and who may command: tokens in a private file, one-time links, sessions that expire.

The view token never travels: a *ticket* is made of it (time, random number, HMAC-SHA256) by whoever may read
the file, opens the page once, within ``TICKET_S``, and is exchanged for a cookie. The control token is a
second secret that the page asks for and sends with each command; a cookie alone commands nothing, because a
browser sends the cookies of 127.0.0.1 to every port there.
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

from .limits import Rate

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

_HEAD = struct.Struct("<d16s")


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


def new_ticket(view_token: str, now: float | None = None) -> str:
    """A text that opens the page once."""
    head = _HEAD.pack(time.time() if now is None else now, secrets.token_bytes(16))
    return base64.urlsafe_b64encode(head + _mac(view_token, head)).decode().rstrip("=")


def link_to(tokens: TokenFile) -> str:
    """A link that opens the page of ``tokens`` once, for ``TICKET_S`` seconds."""
    return f"http://127.0.0.1:{tokens.port}/open?ticket={new_ticket(tokens.view)}"


@dataclass
class Session:
    """One browser."""

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

    def redeem(self, ticket: str) -> tuple[str, Session] | str:
        """Cookie and session for ``ticket``, or why it opens nothing."""
        try:
            body = base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4))
        except ValueError:
            body = b""
        head, mac = body[: _HEAD.size], body[_HEAD.size :]
        with self._lock:
            if len(head) < _HEAD.size or not hmac.compare_digest(mac, _mac(self.view, head)):
                return "wrong ticket"
            made, number = _HEAD.unpack(head)
            now = self._clock()
            if not made - CLOCK_S <= now <= made + TICKET_S:
                return "expired ticket"
            if number in self._used:
                return "used ticket"
            self._used = {each: until for each, until in self._used.items() if until > now}
            self._used[number] = made + TICKET_S
            cookie = new_token()
            session = Session(name=secrets.token_hex(4), began=now, used=now)
            if len(self._sessions) >= MOST_SESSIONS:
                self._end(min(self._sessions, key=lambda key: self._sessions[key].used))
            self._sessions[_digest(cookie)] = session
            return cookie, session

    def session(self, cookie: str | None) -> Session | str:
        """The session of ``cookie``, or why there is none."""
        if not cookie:
            return "no session"
        with self._lock:
            key = _digest(cookie)  # looked up by digest: the time it takes says nothing of the cookie
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

    def end(self, cookie: str) -> None:
        """End the session of ``cookie``."""
        with self._lock:
            self._end(_digest(cookie))

    def _end(self, key: bytes) -> None:
        found = self._sessions.pop(key, None)
        if found is not None:
            found.ended = True

    def _is_late(self, session: Session) -> bool:
        now = self._clock()
        return now > session.used + SESSION_S or now > session.began + LONGEST_SESSION_S


def _mac(token: str, head: bytes) -> bytes:
    return hmac.new(token.encode(), b"mt-scope ticket\0" + head, hashlib.sha256).digest()


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()
