"""A page that is served in a thread of the test's process, and clients that say what browsers do not."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.sidecar.hub import Hub, ServeOptions
from mt_megatron.scope.web import serve
from mt_megatron.scope.web.access import TokenFile, new_ticket, read_token_file
from mt_megatron.scope.web.pack import unpack


@dataclass(kw_only=True)
class Reply:
    """One answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def json(self) -> Any:
        return json.loads(self.body)

    def unpacked(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return unpack(self.body)


@dataclass(kw_only=True)
class Served:
    """A page that is served."""

    run: Path
    hub: Hub
    tokens: TokenFile
    said: list[str]
    commands: list[dict[str, Any]] = field(default_factory=list)
    """Frames that the hub gave to rank 0."""

    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return self.tokens.port

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        session: str | None = None,
        body: bytes | None = None,
        **headers: str | None,
    ) -> Reply:
        """One request, exactly as given: ``Host`` is right unless ``host`` is given (None: none)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        given: dict[str, str | None] = {
            "host": f"127.0.0.1:{self.port}",
            "x_scope_session": session,
            **headers,
        }
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name.replace("_", "-"), value)
            if body is not None and "content_length" not in headers:
                connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
            found = connection.getresponse()
            return Reply(status=found.status, headers=found.getheaders(), body=found.read())
        finally:
            connection.close()

    def enter(self) -> str:
        """A new session's token."""
        reply = self.redeem(new_ticket(self.tokens.view))
        assert reply.status == 200, reply
        return str(reply.json()["session"])

    def redeem(self, ticket: str) -> Reply:
        """As the page of a link does it."""
        return self.post("/api/open", {"ticket": ticket}, None)

    def post(
        self, path: str, value: Any, session: str | None, *, control: str | None = None, **headers: str | None
    ) -> Reply:
        """As the page posts."""
        plain: dict[str, str | None] = {
            "origin": self.origin,
            "content_type": "application/json",
            "x_scope_control": control,
            **headers,
        }
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return self.ask(path, method="POST", session=session, body=body, **plain)

    @contextlib.contextmanager
    def connect(self, session: str | None, origin: str | None = "own") -> Iterator[ClientConnection]:
        """A websocket as the page opens it; without a session nothing is said. Raises
        ``websockets.InvalidStatus`` or ``ConnectionClosed``."""
        with connect(
            f"ws://127.0.0.1:{self.port}/live",
            origin=Origin(self.origin) if origin == "own" else origin and Origin(origin),  # type: ignore[arg-type]
        ) as link:
            if session is not None:
                link.send(json.dumps({"do": "session", "token": session}))
                assert json.loads(link.recv(timeout=20)) == {"k": "entered"}
            yield link

    def raw(self, data: bytes, *, answers: bool = False) -> bytes:
        """Send ``data`` as it is; what came back until the server closed or was silent for a second; where it
        ``answers``, its first word is waited for."""
        found = b""
        link = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        with link, contextlib.suppress(OSError):
            link.sendall(data)
            link.settimeout(20.0 if answers else 1.0)
            while piece := link.recv(65536):
                found += piece
                link.settimeout(1.0)
        return found

    def audit(self) -> list[dict[str, Any]]:
        text = (scope_files(self.run).root / "audit.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def publish(self, event: Mapping[str, Any]) -> None:
        self.loop.call_soon_threadsafe(self.hub.publish, event)

    def answer(self, frame: Mapping[str, Any]) -> None:
        """What rank 0 sends back."""
        self.loop.call_soon_threadsafe(self.hub.answered, frame)


@contextlib.contextmanager
def served(
    run: Path,
    *,
    live: bool = False,
    answers: bool = True,
    replies: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] | None = None,
) -> Iterator[Served]:
    """The page on ``run``. ``live``: ranks are there, which answer commands with what they were told, or with
    the fields of a result that ``replies`` makes of the frame of a command."""
    hub = Hub(scope_files(run), live=live)
    said: list[str] = []
    commands: list[dict[str, Any]] = []
    ready, box = threading.Event(), []

    def send(frame: Mapping[str, Any]) -> bool:
        commands.append(dict(frame))
        if answers:
            value = {"did": frame["do"], **dict(frame["arguments"])}
            result = {"k": "result", "id": frame["id"], "ok": True, "value": value, "error": None}
            if replies and frame["do"] in replies:
                result |= replies[frame["do"]](frame)
            asyncio.get_running_loop().call_soon(hub.answered, result)
        return True

    async def main() -> None:
        hub.attach(send=send, states=tuple)

        def say(text: str) -> None:
            said.append(text)
            ready.set()

        options = ServeOptions(run=run, port=0, say=say)
        task = asyncio.ensure_future(serve(hub, lambda: open_recording(run), options))
        box.append((asyncio.get_running_loop(), task))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(60), said
    loop, task = box[0]
    tokens = read_token_file(scope_files(run).root / "page.json")
    one = Served(run=run, hub=hub, tokens=tokens, said=said, commands=commands, loop=loop)
    until = time.monotonic() + 30
    while one.ask("/api/run").status != 401:
        assert time.monotonic() < until
        time.sleep(0.02)
    try:
        yield one
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(20)
        assert not thread.is_alive()
