"""Hub between the page and the sidecar: events as they happen, commands, requests, bookmarks.

All of it belongs to one asyncio loop; ``Hub.publish_soon`` and what changes files, ``Hub.set_requests``, may
be called from other threads.

Events are plain maps with the key ``k``:

======== =============================================================================================
step     step, session, and the columns of ``Recording.steps`` as numbers (None: not known)
stats    step, session, values [[path, statistic, value or None, partial], …]
tensor   step, session, path, what, microbatch, shape, indices: these tensors can be read
tokens   step, session: tokens can be read
alert    step, session, kind, path, statistic, value, low, high, text, time_ns
dropped  source, rank, frames, bytes: sums since the session's start
ranks    ranks: as ``Hub.ranks`` gives them, when one came or went
result   id, ok, value, error: the answer to a command, also one that nobody waits for any more
requests texts
bookmark step, text, time_unix
ended    nothing more is recorded; the page may ask for the last state until it leaves
lost     events that this subscriber missed because it was slow; ask the recording again
======== =============================================================================================
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mt_megatron.errors import ScopeError
from mt_megatron.scope.format.frames import FrameError
from mt_megatron.scope.recording.files import ScopeFiles, read_requests, write_requests

Event = Mapping[str, Any]

COMMAND_SECONDS = 30.0
"""Longest wait for the answer to a command unless somebody says otherwise: a step may take that long."""

MOST_COMMANDS = 64
"""Commands that wait for an answer at the same time."""

LEAVING_SECONDS = 0.05
"""Between two looks whether subscribers have left."""

MOST_EVENTS = 256
"""Events that wait for a subscriber; further ones are dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Answer to a command."""

    id: str
    ok: bool
    value: Any = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank of this node as the sidecar sees it."""

    rank: int
    connected: bool
    ended: bool
    """It said that it ends."""

    session: str
    frames: int
    bytes: int
    step: int
    """Last step of which something came; -1: none."""

    dropped_frames: int
    """By this sidecar."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of ``scope.web.serve``."""

    run: Path
    """Folder of the run."""

    port: int
    """On loopback; 0: one that is free."""

    token_file: Path | None = None
    """Where the address with the one-time token is written besides, mode 0600."""

    keeps_tokens: bool = True
    """True where port and tokens lie in ``page.json`` of the run, where ``scope open`` finds them."""

    compared: tuple[Path, ...] = ()
    """Folders of other runs, which the page compares with this one at first."""

    says_control: bool = False
    """True: links hand over control, and the control token is said as well."""

    say: Callable[[str], None] = print
    """Takes the line that says what listens where and how to open it, and troubles."""


class Subscription:
    """Events for one subscriber: ``async for event in subscription``. Ends with ``close`` or the hub."""

    def __init__(self, most: int, closed: Callable[[Subscription], None]) -> None:
        self._most = most
        self._events: deque[Event] = deque()
        self._there = asyncio.Event()
        self._closed = closed
        self._over = False
        self._untold = 0
        self.dropped = 0
        """Events that did not fit, since the start."""

    def put(self, event: Event) -> None:
        """Keep ``event`` for the subscriber, or drop and count it."""
        if self._over:
            return
        if len(self._events) >= self._most:
            self.dropped += 1
            self._untold += 1
            return
        if self._untold:
            self._events.append({"k": "lost", "events": self._untold})
            self._untold = 0
        self._events.append(event)
        self._there.set()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._over:
                raise StopAsyncIteration
            self._there.clear()
            await self._there.wait()
        return self._events.popleft()

    def close(self) -> None:
        """No more events; whoever waits for one ends."""
        if not self._over:
            self._over = True
            self._events.clear()
            self._there.set()
            self._closed(self)


class Hub:
    """Events out, commands in."""

    def __init__(self, files: ScopeFiles, *, live: bool) -> None:
        """``live``: ranks may be connected; without them a hub serves a recording alone."""
        self.files = files
        self.live = live
        self._subscriptions: set[Subscription] = set()
        self._send: Callable[[Mapping[str, Any]], bool] | None = None
        self._states: Callable[[], Sequence[RankState]] = tuple
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests_changed: Callable[[], None] = lambda: None

    # For the page.

    def subscribe(self, most: int = MOST_EVENTS) -> Subscription:
        """Events from now on; at most ``most`` wait for a slow subscriber."""
        subscription = Subscription(most, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription

    async def command(
        self, do: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = COMMAND_SECONDS
    ) -> Result:
        """Send a command to global rank 0 and wait for its answer. Without an answer in time the result says
        so (the command may still run: its ``result`` event comes later). Never raises for what ranks do."""
        number = f"{self._prefix}-{next(self._numbers)}"
        if self._send is None or not self.live:
            return Result(id=number, ok=False, error="no training is connected: this is a recording")
        if len(self._waiting) >= MOST_COMMANDS:
            return Result(id=number, ok=False, error=f"{MOST_COMMANDS} commands wait already; send it later")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            frame = {"k": "command", "id": number, "do": do, "arguments": dict(arguments or {})}
            try:
                sent = self._send(frame)
            except FrameError as error:
                return Result(id=number, ok=False, error=str(error))
            if not sent:
                return Result(id=number, ok=False, error="global rank 0 is not connected; is the run alive?")
            return await asyncio.wait_for(asyncio.shield(future), timeout_s)
        except asyncio.TimeoutError:
            return Result(
                id=number,
                ok=False,
                error=f"no answer to {do!r} within {timeout_s:g} s: a step takes longer, or training hangs; "
                "the command may still be carried out",
            )
        finally:
            self._waiting.pop(number, None)
            future.cancel()

    def ranks(self) -> tuple[RankState, ...]:
        """Ranks of this node, by number."""
        return tuple(self._states())

    def requests(self) -> list[str]:
        """What the ranks are asked for besides the defaults. Raises ``ScopeError`` for a damaged file."""
        return read_requests(self.files)

    def set_requests(self, texts: Sequence[str]) -> None:
        """Ask the ranks of all nodes for ``texts`` instead; any thread, since files may wait. Raises
        ``ScopeError`` for too many or too long texts and ``OSError`` where the file cannot be written."""
        write_requests(self.files, texts)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._requests_changed)

    # For the sidecar.

    def attach(
        self,
        *,
        send: Callable[[Mapping[str, Any]], bool],
        states: Callable[[], Sequence[RankState]],
        requests_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect to the ranks. Within the loop: ``send`` gives a frame to global rank 0 and says whether
        it is there."""
        self._loop = asyncio.get_running_loop()
        self._send, self._states, self._requests_changed = send, states, requests_changed

    def publish(self, event: Event) -> None:
        """Give ``event`` to all subscribers."""
        for subscription in tuple(self._subscriptions):
            subscription.put(event)

    def publish_soon(self, event: Event) -> None:
        """``publish`` from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.publish, event)

    def answered(self, frame: Mapping[str, Any]) -> None:
        """A checked ``result`` frame came."""
        result = Result(id=str(frame["id"]), ok=bool(frame["ok"]), value=frame["value"], error=frame["error"])
        future = self._waiting.get(result.id)
        if future is not None and not future.done():
            future.set_result(result)
        self.publish({"k": "result", **asdict(result)})

    async def end(self, seconds: float) -> None:
        """Say that the run has ended and wait for subscribers to leave, at most ``seconds``: until then the
        page can be asked for the last steps."""
        self.live = False
        self.publish({"k": "ended"})
        until = time.monotonic() + seconds
        while self._subscriptions and time.monotonic() < until:
            await asyncio.sleep(LEAVING_SECONDS)

    def close(self) -> None:
        """End all subscriptions and commands."""
        for subscription in tuple(self._subscriptions):
            subscription.close()
        for number, future in tuple(self._waiting.items()):
            if not future.done():
                future.set_result(Result(id=number, ok=False, error="the sidecar ends"))


def recording_hub(files: ScopeFiles) -> Hub:
    """A hub for a recording without ranks. Raises ``ScopeError`` where there is no folder."""
    if not files.root.is_dir():
        raise ScopeError(f"found no folder {files.root}; give that of a run with a recording")
    return Hub(files, live=False)
