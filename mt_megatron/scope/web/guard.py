"""Checks before any route: loopback, Host, Origin, session, rates; headers of every answer.

A hostile page that a user has open next to this one can send requests here, also under a name of its own
that it makes point to 127.0.0.1 (DNS rebinding). Its Host is that name and its Origin is not ours: both are
checked on every request and on every websocket, before a session is looked at.
"""

from __future__ import annotations

import ipaddress
import re
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access import Access, Session
from .audit import Audit
from .limits import Rate
from .messages import MOST_BYTES, MOST_QUERY

HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names by which a browser may reach this server, before the port (which ``ssh -L`` changes)."""

OPEN_PATHS = frozenset({"/open", "/assets/open.js"})
"""What answers without a session."""

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
    "MegaScope: this browser has no session here ({why}).\n\n"
    "On the machine that trains, run    mt-megatron scope open RUN    and open the link that it prints.\n"
    "It works once, and for two minutes.\n"
)

STRANGERS_PER_S, STRANGERS_BURST = 20.0, 60.0
"""Requests without a session that are answered, of all clients together."""

_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class Guard:
    """ASGI middleware around the routes; ``scope["session"]`` is set for them."""

    def __init__(self, app: ASGIApp, *, access: Access, audit: Audit) -> None:
        self._app = app
        self._access = access
        self._audit = audit
        self._strangers = Rate(STRANGERS_PER_S, STRANGERS_BURST)

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
            if not self._strangers.take():
                return 429, "flood", "too many requests\n"
            return stranger
        found = self._access.session(cookie_of(headers, scope))
        if isinstance(found, Session):
            scope["session"] = found
            if not found.rate.take():
                return 429, "flood", "too many requests\n"
            return None
        if not self._strangers.take():
            return 429, "flood", "too many requests\n"
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return None
        return 401, found, HOW_TO_OPEN.format(why=found)

    def _stranger(self, scope: Scope, headers: Headers) -> tuple[int, str, str] | None:
        """What shows that the request comes from elsewhere, or is none that this page makes."""
        client = scope.get("client")
        if client is not None and not is_loopback(client[0]):
            return 403, "foreign address", "only this machine may ask\n"
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            return 421, "foreign host", "the Host header names another machine\n"
        origins = headers.getlist("origin")
        writes = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        if len(origins) > 1 or (origins and origins[0].lower() != f"http://{hosts[0].lower()}"):
            return 403, "foreign origin", "the Origin header names another page\n"
        if writes and not origins:
            return 403, "no origin", "expected an Origin header\n"
        site = headers.getlist("sec-fetch-site")
        # A link from elsewhere may open the page (it needs a ticket), and nothing else.
        if scope["path"] != "/open" and any(each not in ("same-origin", "none") for each in site):
            return 403, "foreign site", "another page asked for this\n"
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "method", "expected GET or POST\n"
        raw = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogatepass")
        if b"%" in raw or b"\\" in raw or b".." in raw or b"//" in raw or len(raw) > 300 or not raw.isascii():
            return 400, "path", "no such path\n"
        if len(scope.get("query_string", b"")) > MOST_QUERY:
            return 414, "query", f"expected a query of at most {MOST_QUERY:,} characters\n"
        length = headers.get("content-length")
        if length is not None and not (length.isascii() and length.isdigit() and int(length) <= MOST_BYTES):
            return 413, "oversized", f"expected at most {MOST_BYTES:,} bytes\n"
        return None


def cookie_name(scope: Scope) -> str:
    """By port: cookies of 127.0.0.1 are common to all of its ports."""
    server = scope.get("server")
    return f"mt_scope_{server[1] if server else 0}"


def cookie_of(headers: Headers, scope: Scope) -> str | None:
    """The session's cookie; None without one, or with several."""
    name = cookie_name(scope)
    found: list[str] = []
    for header in headers.getlist("cookie"):
        try:
            jar: SimpleCookie = SimpleCookie(header)
        except CookieError:
            continue
        if name in jar:
            found.append(jar[name].value)
        if header.count(f"{name}=") > 1:
            return None
    return found[0] if len(found) == 1 else None


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches ``address``, an IP address or ``localhost``."""
    if address.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


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
    response: Response = PlainTextResponse(body, status)
    await response(scope, receive, _with_headers(send))
