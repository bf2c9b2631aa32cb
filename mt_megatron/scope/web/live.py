"""The websocket: notices of what is new, from a bounded queue per browser.

Notices are small; the data itself is asked for by HTTP when the page draws it. So a browser that stands still
holds at most ``QUEUE`` notices here and one message in its socket; the rest is dropped and counted, and it is
disconnected when it answers no ping.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from mt_megatron.host.bounds import Rate
from mt_megatron.host.peers import REQUEST_S
from mt_megatron.scope.recording.audit import Audit

from .access import Access, Session
from .messages import MOST_BYTES, Refused, parse_json, parse_socket
from .source import Live, Subscription

QUEUE = 256
"""Notices that wait for one browser."""

_KEPT_TEXTS = 16
"""Notices whose text is kept for browsers that take it a moment later; events may be large."""

MESSAGES_PER_S, MESSAGES_BURST = 10.0, 40.0
"""Of one browser."""

MOST_SOCKETS = 32

SEND_S = 60.0
"""A browser that takes no notice for so long is disconnected."""

ENDED_S = 0.5
"""From one look at its session to the next."""

ENTERED = '{"k":"entered"}'
"""The first notice: from here on no event is missed."""

POLICY_VIOLATION, TRY_LATER = 1008, 1013

_LONGEST = 4_000
_KINDS = frozenset(
    {
        "step",
        "stats",
        "tensor",
        "tokens",
        "alert",
        "dropped",
        "result",
        "requests",
        "ranks",
        "bookmark",
        "lost",
        "ended",
    }
)
_LEFT_OUT = frozenset(
    {"data", "scale", "low", "values", "ids", "loss_rows", "entropy", "top_ids", "top_logprobs"}
)


class Sockets:
    """All open websockets of a server."""

    def __init__(self, live: Live | None, audit: Audit) -> None:
        self._live = live
        self._audit = audit
        self.open = 0
        self.dropped = 0
        """Notices that browsers did not take, of all of them."""

        self.state: dict[str, Any] | None = None
        """What the training last said of itself: paused, steps_left, armed ... None: nothing yet."""

        self._texts: dict[int, tuple[Mapping[str, Any], str]] = {}
        """By ``id`` of the event, which is kept with its notice: each is written once for all browsers."""

    async def listen(self) -> None:
        """Keep ``state`` up to date, for browsers that come later. Until cancelled."""
        if self._live is None:
            return
        subscription = self._live.subscribe(QUEUE)
        try:
            async for event in subscription:
                if event.get("k") == "ended":
                    return
                if event.get("k") == "result" and event.get("id") == "state" and event.get("ok"):
                    value = small(event).get("value")
                    self.state = value if isinstance(value, dict) else None
        finally:
            subscription.close()

    async def serve(self, socket: WebSocket, access: Access) -> None:
        """One browser, until it leaves or the session of its first message ends."""
        if self._live is None or self.open >= MOST_SOCKETS:
            await socket.close(TRY_LATER)
            return
        await socket.accept()
        session = await self._entered(socket, access)
        if session is None:
            return
        has_ended = functools.partial(access.has_ended, session)
        self.open += 1
        subscription = self._live.subscribe(QUEUE)
        wanted: set[str] = set(_KINDS)
        tasks = [
            asyncio.create_task(self._send(socket, subscription, wanted, has_ended)),
            asyncio.create_task(self._receive(socket, wanted)),
            asyncio.create_task(_close(socket, has_ended)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.exception()  # taken: a browser may leave at any moment, in any way
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.dropped += subscription.dropped
            subscription.close()
            self.open -= 1
            if not self.open:
                self._texts.clear()
            with contextlib.suppress(Exception):  # closed already
                await socket.close()

    async def _entered(self, socket: WebSocket, access: Access) -> Session | None:
        """The session that the first message names, within the time that a request has; None where it names
        none: the websocket is closed then."""
        found: Session | str = "no session"
        gone = (RuntimeError, WebSocketDisconnect)
        with contextlib.suppress(asyncio.TimeoutError, KeyError, Refused, *gone):
            said = parse_json(await asyncio.wait_for(socket.receive_text(), REQUEST_S))  # KeyError: bytes
            found = access.session(parse_socket(said)[1]["token"])
        if isinstance(found, Session):
            return found
        self._audit.refused(found, path="/live")
        with contextlib.suppress(*gone):
            await socket.close(POLICY_VIOLATION)
        return None

    async def _send(
        self,
        socket: WebSocket,
        subscription: Subscription,
        wanted: set[str],
        has_ended: Callable[[], bool],
    ) -> None:
        told = 0
        await asyncio.wait_for(socket.send_text(ENTERED), SEND_S)
        async for event in subscription:
            if has_ended():
                await socket.close(POLICY_VIOLATION)
                return
            if event.get("k") not in wanted:
                continue
            if subscription.dropped > told:
                told = subscription.dropped
                text = _written({**small(event), "browser_dropped": told})
            else:
                text = self._text(event)
            await asyncio.wait_for(socket.send_text(text), SEND_S)

    def _text(self, event: Mapping[str, Any]) -> str:
        """The notice of ``event``."""
        kept = self._texts.get(id(event))
        if kept is None:
            kept = self._texts[id(event)] = event, _written(small(event))
            if len(self._texts) > _KEPT_TEXTS:
                del self._texts[next(iter(self._texts))]
        return kept[1]

    async def _receive(self, socket: WebSocket, wanted: set[str]) -> None:
        rate = Rate(MESSAGES_PER_S, MESSAGES_BURST)
        while True:
            message = await socket.receive()
            if message["type"] != "websocket.receive":
                raise WebSocketDisconnect
            text = message.get("text")
            why = None
            try:
                if not rate.take():
                    why = "too many messages"
                elif not isinstance(text, str) or len(text) > MOST_BYTES:
                    why = "no text"
                else:
                    do, fields = parse_socket(parse_json(text))
                    if do == "session":
                        why = "a second session"
                    elif do == "kinds":
                        wanted.clear()
                        wanted.update(_KINDS.intersection(fields["kinds"].split(",")))
            except Refused as refused:
                why = str(refused)
            if why is not None:
                self._audit.refused("message", says=why)
                await socket.close(POLICY_VIOLATION)
                return


async def _close(socket: WebSocket, has_ended: Callable[[], bool]) -> None:
    """Close it once its session has ended, within ``ENDED_S``."""
    while not has_ended():
        await asyncio.sleep(ENDED_S)
    await socket.close(POLICY_VIOLATION)


def _written(notice: Mapping[str, Any]) -> str:
    return json.dumps(notice, separators=(",", ":"))


def small(event: Mapping[str, Any]) -> dict[str, Any]:
    """``event`` without arrays and long texts, as JSON takes it."""
    found: dict[str, Any] = {}
    for key, value in event.items():
        if key in _LEFT_OUT:
            continue
        plain = _plain(value, 0)
        if plain is not _NOTHING:
            found[str(key)] = plain
    return found


_NOTHING = object()


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value[:_LONGEST]
    if depth < 5 and isinstance(value, Mapping):
        pairs = {str(key): _plain(each, depth + 1) for key, each in list(value.items())[:256]}
        return {key: each for key, each in pairs.items() if each is not _NOTHING}
    if depth < 5 and isinstance(value, list | tuple):
        return [each for each in (_plain(one, depth + 1) for one in value[:512]) if each is not _NOTHING]
    return _NOTHING
