"""The sidecar of one node: socket, recording, page, requests, and when all of it ends."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mt_megatron.errors import MtMegatronError, ScopeError
from mt_megatron.scan.format.permissions import make_private_folder
from mt_megatron.scan.monitor.child_process import is_alive
from mt_megatron.scope.recording.files import ScopeFiles, read_requests, scope_files, this_host
from mt_megatron.scope.recording.node import NodeFile, sessions_before
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.writer import Writer

from .follow import Follower
from .hub import Hub, ServeOptions
from .keeper import Keeper
from .ranks import Ranks
from .sinks.queued import queued

POLL_SECONDS = 1.0
"""Between two looks at the requests."""

PARENT_SECONDS = 0.5
"""Between two looks whether the parent runs and ranks have ended."""

DRAIN_SECONDS = 2.0
"""At the end, for what ranks have sent and is not read yet, and for browsers to take the last state."""

AFTER_BYE_SECONDS = 1.0
"""Another rank may come so long after all that came have ended."""

_MISSING = "scope: no live page ({}); it needs: pip install 'mt_megatron[scope]'. Recording goes on"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line."""

    run: Path
    socket: Path
    node: int
    parent: int | None
    retain_mib: int = 512
    ranks: int = 0
    """Of this node; 0: not known."""

    serve: bool = False
    port: int = 0
    token_file: Path | None = None
    sinks: tuple[str, ...] = ()


async def run_sidecar(options: Options, say: Callable[[str], None], stop: asyncio.Event) -> None:
    """Serve the node's ranks until ``stop``, the parent's end or the ranks'.

    Raises ``ScopeError`` where the socket or the recording cannot be made; whatever happens later is told to
    ``say`` in a line.
    """
    files = scope_files(options.run)
    writer = _writer(files, options, say)
    keeper = Keeper(writer)
    hub = Hub(files, live=True)
    ranks = Ranks(keeper, hub, say)
    requests = _Requests(files, ranks, keeper, hub, say)
    hub.attach(send=ranks.command, states=ranks.states, requests_changed=requests.look)
    try:
        await ranks.listen(options.socket)
    except ScopeError:
        keeper.close()
        raise
    keeper.start()
    follower: Follower | None = None
    if options.node == 0:
        follower = Follower(
            files,
            keeper=keeper,
            before=taken_before(files, writer, say),
            publish=hub.publish_soon,
            open_sinks=partial(queued, options.sinks, options.run, say),
            say=say,
        )
        follower.start()
    tasks = [asyncio.create_task(requests.poll())]
    if options.serve:
        serve_options = ServeOptions(
            run=options.run, port=options.port, token_file=options.token_file, say=say
        )
        tasks.append(asyncio.create_task(served(hub, serve_options)))
    try:
        await _until_the_end(options, ranks, stop)
    finally:
        await ranks.close(DRAIN_SECONDS)
        # Frames that wait are written before the follower takes its last look.
        await asyncio.to_thread(keeper.flush)
        if follower is not None:
            await asyncio.to_thread(follower.close)
        await hub.end(DRAIN_SECONDS)
        hub.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(keeper.close)


def _writer(files: ScopeFiles, options: Options, say: Callable[[str], None]) -> Writer:
    host = this_host()
    path = files.node(host, options.node)
    try:
        make_private_folder(files.root)
        return Writer(path, node=options.node, host=host, retain_bytes=options.retain_mib << 20, say=say)
    except (OSError, sqlite3.Error) as error:
        raise ScopeError(
            f"{path} cannot be written ({error}); expected a folder with room that this user may write. Make "
            "room or set --scope-dir to another folder"
        ) from error


def taken_before(
    files: ScopeFiles, writer: Writer, say: Callable[[str], None]
) -> dict[tuple[str, int], tuple[int, int]]:
    """``Writer.before`` of all files that a node 0 has written: it may have been on other hosts."""
    found = dict(writer.before)
    for path in files.nodes():
        if path == writer.path or not path.stem.endswith("-00000"):
            continue
        try:
            node = NodeFile(path)
            try:
                more = sessions_before(node.rows)
            finally:
                node.close()
        except (ScopeError, OSError) as error:
            say(f"scope: {error}; alerts of the runs in it may be told again")
            continue
        for key, (step, sample) in more.items():
            known = found.get(key, (-1, -1))
            found[key] = (max(step, known[0]), max(sample, known[1]))
    return found


async def _until_the_end(options: Options, ranks: Ranks, stop: asyncio.Event) -> None:
    while not stop.is_set():
        if options.parent is not None and not is_alive(options.parent):
            return
        quiet = time.monotonic() - ranks.changed_at >= AFTER_BYE_SECONDS
        if quiet and ranks.all_ended(options.ranks):
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), PARENT_SECONDS)


async def served(hub: Hub, options: ServeOptions) -> None:
    """Serve the page; what keeps it from being served is told in a line."""
    try:
        serve: Callable[..., Coroutine[Any, Any, None]] = import_module("mt_megatron.scope.web").serve
    except (ImportError, AttributeError) as error:
        options.say(_MISSING.format(error))
        return
    try:
        await serve(hub, lambda: open_recording(hub.files.root), options)
    except asyncio.CancelledError:
        raise
    except ImportError as error:
        options.say(_MISSING.format(error))
    except MtMegatronError as error:
        options.say(f"scope: no live page: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a web server may raise anything
        options.say(f"scope: the live page has ended ({type(error).__name__}: {error}); recording goes on")


class _Requests:
    """``requests.json`` to this node's ranks, whenever it changes."""

    def __init__(
        self, files: ScopeFiles, ranks: Ranks, keeper: Keeper, hub: Hub, say: Callable[[str], None]
    ) -> None:
        self._files = files
        self._ranks = ranks
        self._keeper = keeper
        self._hub = hub
        self._say = say
        self._seen: tuple[int, int, int] | None = None
        self._texts: list[str] = []
        self._changed = asyncio.Event()

    def look(self) -> None:
        """Look at once."""
        self._changed.set()

    async def poll(self) -> None:
        """Look each second. A file system that does not answer holds up a thread, not the ranks' frames."""
        while True:
            self._changed.clear()
            texts = await asyncio.to_thread(self._read)
            if texts is not None and texts != self._texts:
                self._take(texts)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)

    def _read(self) -> list[str] | None:
        """The requests if the file changed; a deleted one takes all back. A damaged one is told and changes
        nothing."""
        mark: tuple[int, int, int] | None = None
        try:
            found = self._files.requests.stat()
            mark = (found.st_mtime_ns, found.st_size, found.st_ino)
        except FileNotFoundError:
            pass
        except OSError:
            return None  # of a file system that does not answer
        if mark == self._seen:
            return None
        self._seen = mark
        try:
            return read_requests(self._files)
        except (ScopeError, OSError) as error:
            self._say(f"scope: the requests stay as they are: {error}")
            return None

    def _take(self, texts: list[str]) -> None:
        self._texts = texts
        self._ranks.watch(texts)
        self._keeper.call(lambda writer: writer.requested(texts))
        self._hub.publish({"k": "requests", "texts": texts})
