"""The page's application: files, data by name, commands, notices. Every route lies behind ``guard.Guard``."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from mt_megatron.errors import MtMegatronError, ScopeError
from mt_megatron.host.bounds import Rate, Recent
from mt_megatron.host.peers import Address
from mt_megatron.scope.recording.audit import UNWRITTEN, Audit
from mt_megatron.scope.watch import requests

from .access import Access, Session, proof_of
from .assets import Asset
from .guard import Guard, TooLarge, session_of
from .live import Sockets
from .messages import BOOKMARK, OPEN, PROOF, Refused, checked, parse_command, parse_json, parse_query
from .pack import CONTENT_TYPE
from .source import Bookmark, Live
from .views.context import Answer, Context
from .views.registry import DATA

WORKERS = 2
"""Views that are computed at a time."""

WAITING = 48
"""Requests that wait for one; more are told to come again."""

COMMANDS_PER_S, COMMANDS_BURST = 4.0, 16.0
"""Of one session."""

PATIENCE_S: Mapping[str, float] = {"generate": 600.0, "undo": 120.0, "pair": 600.0}
"""Seconds in which a command's result is waited for; 30 for others."""

MOST_NEIGHBOURS = 8
"""Other runs that are open at a time."""

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Site:
    """What one server serves."""

    context: Context
    access: Access
    audit: Audit
    files: Mapping[str, Asset]
    live: Live | None = None
    neighbours: Callable[[], Mapping[str, Callable[[], Context]]] = dict
    """Names of other runs and how each is opened. A request's name is looked up there and nowhere else."""

    compared: tuple[str, ...] = ()
    """Names of the neighbours that the page compares at first."""

    bookmark: Callable[[Bookmark], None] | None = None
    """How a bookmark is kept; None: by the source."""

    sockets: Sockets = field(init=False)

    def __post_init__(self) -> None:
        self.sockets = Sockets(self.live, self.audit)


def application(site: Site, takes: Callable[[Address | None], bool]) -> ASGIApp:
    """The guarded application. ``takes``: as of ``host.peers.Listener``."""
    routes = _Routes(site)
    app = Starlette(
        routes=[
            Route("/api/open", routes.open, methods=["POST"]),
            Route("/api/proof", routes.proof, methods=["GET"]),
            Route("/api/command", routes.command, methods=["POST"]),
            Route("/api/control", routes.control, methods=["POST"]),
            Route("/api/bookmark", routes.bookmark, methods=["POST"]),
            Route("/api/leave", routes.leave, methods=["POST"]),
            Route("/api/server", routes.server, methods=["GET"]),
            Route("/api/runs", routes.runs, methods=["GET"]),
            Route("/api/{name}", routes.data, methods=["GET"]),
            WebSocketRoute("/live", routes.sockets),
            Route("/", routes.file, methods=["GET"]),
            Route("/open", routes.file, methods=["GET"]),
            Route("/assets/{name}", routes.file, methods=["GET"]),
        ],
        exception_handlers={
            Refused: _refused,
            TooLarge: _too_large,
            ClientDisconnect: _gone,
            HTTPException: _http,
            ScopeError: _unreadable,
            Exception: _failed,
        },
    )
    return Guard(app, access=site.access, audit=site.audit, takes=takes)


class _Routes:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._limiter: CapacityLimiter | None = None
        self._waiting = 0
        self._rates: Recent[str, Rate] = Recent(64)
        self._others: Recent[str, Context] = Recent(MOST_NEIGHBOURS)
        self._opening = threading.Lock()

    async def open(self, request: Request) -> Response:
        """Exchange a ticket for a session, which the tab keeps for itself."""
        access = self._site.access
        found = access.redeem(checked(parse_json(await request.body()), OPEN)["ticket"])
        if isinstance(found, str):
            self._site.audit.refused(found, path="/api/open")
            raise HTTPException(
                403,
                f"{found}: a link works once, and for two minutes; make another with 'mt-megatron scope open "
                "RUN'",
            )
        token, session, controls = found
        self._site.audit.write("opened", session=session.name, controls=controls)
        return JSONResponse({"session": token, "control": access.control if controls else None})

    async def proof(self, request: Request) -> Response:
        """Show that this server is the run's own to whoever has its view token as well."""
        (challenge,) = checked(dict(request.query_params), PROOF).values()
        return PlainTextResponse(proof_of(self._site.access.view, challenge))

    async def file(self, request: Request) -> Response:
        """A file of the build; the address of a link is the page, which posts the ticket."""
        path = request.url.path
        asset = self._site.files.get("/" if path == "/open" else path)
        if asset is None:
            raise HTTPException(404)
        headers = {"ETag": asset.etag, "Cache-Control": "private, no-cache"}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        if asset.encoding is not None:
            headers["Content-Encoding"] = asset.encoding
        return Response(asset.body, media_type=asset.content_type, headers=headers)

    async def data(self, request: Request) -> Response:
        """Data of a view."""
        name = request.path_params["name"]
        make = DATA.get(name)
        if make is None:
            raise HTTPException(404)
        query = parse_query(name, request.query_params.multi_items())
        if self._limiter is None:
            self._limiter = CapacityLimiter(WORKERS)
        if self._waiting >= WAITING:
            return PlainTextResponse("busy; ask again\n", 503, {"Retry-After": "1"})
        self._waiting += 1
        try:
            answer, body = await to_thread.run_sync(self._made, make, query, limiter=self._limiter)
        except KeyError as missing:
            text = str(missing.args[0])[:300] if missing.args else "not recorded"
            return JSONResponse({"error": text}, 404)
        finally:
            self._waiting -= 1
        kind = "application/json" if answer.arrays is None else CONTENT_TYPE
        return Response(body, media_type=kind)

    def _made(
        self, make: Callable[[Context, dict[str, Any]], Answer], query: dict[str, Any]
    ) -> tuple[Answer, bytes]:
        if "other" in query:
            query["other"] = self._context(query["other"])
        answer = make(self._context(query.pop("run", None)), query)
        return answer, answer.body()

    def _context(self, name: str | None) -> Context:
        if name is None:
            return self._site.context
        with self._opening:  # workers share the map, and open a run once
            found = self._others.get(name)
            if found is None:
                found = self._site.neighbours()[name]()
                self._others.put(name, found)
            return found

    async def runs(self, request: Request) -> Response:
        """Names of neighbouring runs."""
        found = await to_thread.run_sync(self._site.neighbours)
        return JSONResponse({"runs": sorted(found), "compared": self._site.compared})

    async def server(self, request: Request) -> Response:
        """What this server is."""
        live = self._site.live
        return JSONResponse(
            {
                "live": bool(live is not None and live.live),
                "sockets": self._site.sockets.open,
                "browser_dropped": self._site.sockets.dropped,
                "state": self._site.sockets.state,
            }
        )

    async def control(self, request: Request) -> Response:
        """Whether the control token is right."""
        await self._controlling(request, "control")
        return JSONResponse({"ok": True})

    async def command(self, request: Request) -> Response:
        """Send a command to the training and wait for its result."""
        session, value = await self._controlling(request, "command")
        do, arguments = parse_command(value)
        live = self._site.live
        if live is None or not live.live:
            return JSONResponse({"ok": False, "error": "no training is connected"}, 409)
        written = do not in UNWRITTEN
        if written:
            self._site.audit.write("command", session=session.name, do=do, arguments=_short(arguments))
        if do == "request":
            return await self._request(live, session, arguments["texts"])
        result = await live.command(do, arguments, timeout_s=PATIENCE_S.get(do, 30.0))
        if written:
            self._site.audit.write("result", session=session.name, do=do, ok=bool(result.ok))
        answer = Answer(facts={"ok": bool(result.ok), "value": result.value, "error": result.error})
        # Attention of a generation is millions of numbers, and every browser waits for this thread.
        body = await to_thread.run_sync(answer.body)
        return Response(body, media_type="application/json")

    async def _request(self, live: Live, session: Session, texts: list[str]) -> Response:
        """Ask the ranks of all nodes for ``texts``, by the file that their sidecars read."""
        try:
            for text in texts:
                requests.parse(text)
            await to_thread.run_sync(live.set_requests, texts)
        except MtMegatronError as error:
            return JSONResponse({"ok": False, "error": str(error)}, 400)
        except OSError as error:
            return JSONResponse({"ok": False, "error": f"requests cannot be written: {error}"}, 507)
        # All ranks hear the command between the same two steps, and record the next one.
        result = await live.command("request", {"texts": texts})
        self._site.audit.write("result", session=session.name, do="request", ok=bool(result.ok))
        modules = await to_thread.run_sync(self._site.context.source.modules)
        lines = requests.all_unknown(texts, [each.path for each in modules])
        value = {"texts": texts, "unknown": lines}
        return JSONResponse({"ok": bool(result.ok), "value": value, "error": result.error})

    async def bookmark(self, request: Request) -> Response:
        """Keep a bookmark in the recording."""
        session, value = await self._controlling(request, "bookmark")
        mark = Bookmark(**checked(value, BOOKMARK))
        keep = self._site.bookmark or self._site.context.source.bookmark
        try:
            await to_thread.run_sync(keep, mark)
        except MtMegatronError as error:
            return JSONResponse({"ok": False, "error": str(error)}, 400)
        except OSError as error:
            return JSONResponse({"ok": False, "error": f"the recording cannot be written: {error}"}, 507)
        self._site.audit.write("bookmark", session=session.name, step=mark.step, text=mark.text)
        return JSONResponse({"ok": True})

    async def leave(self, request: Request) -> Response:
        """End the session."""
        self._site.access.end(session_of(request.headers) or "")
        self._site.audit.write("left", session=request.scope["session"].name)
        return JSONResponse({"ok": True})

    async def sockets(self, socket: WebSocket) -> None:
        """Notices."""
        await self._site.sockets.serve(socket, self._site.access)

    async def _controlling(self, request: Request, what: str) -> tuple[Session, Any]:
        """Session and body of a request that has the control token. Raises ``Refused`` or 403, 429."""
        session: Session = request.scope["session"]
        rate = self._rates.get(session.name)
        if rate is None:
            rate = Rate(COMMANDS_PER_S, COMMANDS_BURST)
            self._rates.put(session.name, rate)
        if not rate.take():
            raise HTTPException(429, "too many commands")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused("expected JSON")
        tokens = request.headers.getlist("x-scope-control")
        if len(tokens) != 1 or not self._site.access.controls(tokens[0]):
            self._site.audit.refused("wrong control token", session=session.name, path=what)
            raise HTTPException(403, "this needs the control token")
        return session, parse_json(await request.body())


def _short(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value[:200] if isinstance(value, str | list) else value for key, value in arguments.items()}


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def _too_large(request: Request, error: Exception) -> Response:
    return PlainTextResponse("too large\n", 413)


async def _gone(request: Request, error: Exception) -> Response:
    return PlainTextResponse("", 400)  # nobody reads it; without it each one is a traceback in the log


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def _unreadable(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 503)


async def _failed(request: Request, error: Exception) -> Response:
    # The traceback is for the sidecar's log; a browser learns nothing of it.
    with contextlib.suppress(Exception):
        _LOG.error("%s failed", request.url.path, exc_info=error)
    return JSONResponse({"error": "this view failed; the sidecar's log says why"}, 500)
