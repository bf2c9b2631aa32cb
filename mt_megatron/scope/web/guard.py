"""Checks before any route: loopback, Host, Origin, session, rates; headers of every answer.

A hostile page that a user has open next to this one can send requests here, also under a name of its own
that it makes point to 127.0.0.1 (DNS rebinding). Its Host is that name and its Origin is not ours: both are
checked on every request and on every websocket, before a session is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mt_megatron.host.peers import Address, is_loopback
from mt_megatron.scope.recording.audit import Audit

from .access import Access, Session
from .messages import MOST_BYTES, MOST_QUERY

OPEN_PATHS = frozenset({"/", "/open", "/live", "/api/open", "/api/proof"})
"""What answers without a session, besides the files of the build, which are no secret. The websocket's first
frame names its session."""

SESSION = "x-scope-session"
"""The header with a session's token."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}

HOW_TO_OPEN = (
    "this tab has no session here ({why}). On the machine that trains, run 'mt-megatron scope open RUN' and "
    "open the link that it prints; it works once, and for two minutes"
)

FLOOD = 429, "flood", "too many requests"

_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class Guard:
    """ASGI middleware around the routes; ``scope["session"]`` is set for them."""

    def __init__(
        self, app: ASGIApp, *, access: Access, audit: Audit, takes: Callable[[Address | None], bool]
    ) -> None:
        """``takes``: as of ``host.peers.Listener``, of requests without a session."""
        self._app = app
        self._access = access
        self._audit = audit
        self._takes = takes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            return
        refused = self._refusal(scope)
        if refused is not None:
            status, why, body = refused
            client = scope.get("client")
            self._audit.refused(
                why,
                status=status,
                path=str(scope.get("path", "")),
                host=", ".join(Headers(scope=scope).getlist("host")),
                origin=", ".join(Headers(scope=scope).getlist("origin")),
                client=str(client[0]) if client else "",
            )
            await _refuse(scope, receive, send, status, body)
            return
        if scope["type"] == "http":
            await self._app(scope, _bounded(receive), _with_headers(send))
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, reason for the log and body; None lets the request pass."""
        headers = Headers(scope=scope)
        stranger = self._stranger(scope, headers)
        if stranger is not None:
            return stranger if self._takes(scope.get("client")) else FLOOD
        found = self._access.session(session_of(headers))
        if isinstance(found, Session):
            scope["session"] = found
            return None if found.rate.take() else FLOOD
        if not self._takes(scope.get("client")):
            return FLOOD
        if scope["path"] in OPEN_PATHS or scope["path"].startswith("/assets/"):
            return None
        return 401, found, HOW_TO_OPEN.format(why=found)

    def _stranger(self, scope: Scope, headers: Headers) -> tuple[int, str, str] | None:
        """What shows that the request comes from elsewhere, or is none that this page makes."""
        client = scope.get("client")
        if client is not None and not is_loopback(client[0]):
            return 403, "foreign address", "only this machine may ask"
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            return 421, "foreign host", "the Host header names another machine"
        origins = headers.getlist("origin")
        writes = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        if len(origins) > 1 or (origins and origins[0].lower() != f"http://{hosts[0].lower()}"):
            return 403, "foreign origin", "the Origin header names another page"
        if writes and not origins:
            return 403, "no origin", "expected an Origin header"
        site = headers.getlist("sec-fetch-site")
        # A link from elsewhere may open the page (it needs a ticket), and nothing else.
        if scope["path"] != "/open" and any(each not in ("same-origin", "none") for each in site):
            return 403, "foreign site", "another page asked for this"
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "method", "expected GET or POST"
        raw = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogatepass")
        if b"%" in raw or b"\\" in raw or b".." in raw or b"//" in raw or len(raw) > 300 or not raw.isascii():
            return 400, "path", "no such path"
        if len(scope.get("query_string", b"")) > MOST_QUERY:
            return 414, "query", f"expected a query of at most {MOST_QUERY:,} characters"
        length = headers.get("content-length")
        if length is not None and not (length.isascii() and length.isdigit() and int(length) <= MOST_BYTES):
            return 413, "oversized", f"expected at most {MOST_BYTES:,} bytes"
        return None


def session_of(headers: Headers) -> str | None:
    """The session's token of a request; None without one, or with several."""
    found = headers.getlist(SESSION)
    return found[0] if len(found) == 1 else None


class TooLarge(Exception):
    """A body that goes on beyond ``MOST_BYTES``."""


def _bounded(receive: Receive) -> Receive:
    left = MOST_BYTES

    async def limited() -> Message:
        nonlocal left
        message = await receive()
        if message["type"] == "http.request":
            left -= len(message.get("body", b""))
            if left < 0:
                raise TooLarge
        return message

    return limited


def _with_headers(send: Send) -> Send:
    async def headed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return headed


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, body: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send(
            {"type": "websocket.close", "code": 4000 + status, "reason": ""}
        )  # before accept: HTTP 403
        return
    # After a flood's answer the connection ends: another one costs its holder a place and rate.
    headers = {"Connection": "close"} if status == FLOOD[0] else {}
    await JSONResponse({"error": body}, status, headers)(scope, receive, _with_headers(send))
