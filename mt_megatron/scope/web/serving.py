"""What the sidecar and ``mt-megatron scope open`` call: the page on a hub and a recording."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mt_megatron.errors import ConfigError, ScopeError
from mt_megatron.scope.recording.audit import Audit
from mt_megatron.scope.recording.files import add_bookmark, existing_recording
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.sidecar.hub import Hub, ServeOptions

from .access import Access
from .app import Site
from .assets import assets
from .recorded import RecordedSource
from .server import Page
from .source import Bookmark
from .views.context import Context

TOKEN_FILE = "page.json"
"""``RUN/scope/page.json``, mode 0600: port and tokens of the page that is served now."""

MOST_RUNS = 200
"""Neighbouring runs that are offered for comparison."""

FIRST_S = 30.0
"""The sidecar writes its file a moment after it starts; so long is waited for it."""


async def serve(hub: Hub, open_recording: Callable[[], Recording], options: ServeOptions) -> None:
    """Serve until cancelled. Says one line: what listens where, and how to open it.

    Raises ``ScopeError`` where there is no recording and ``ConfigError`` where no port can be had or the
    build is missing.
    """
    recording = await _opened(open_recording, wait=hub.live)
    root = hub.files.root
    name = options.run.resolve().name or "run"
    page: Page | None = None
    try:
        source = RecordedSource(recording, name, is_live=lambda: hub.live)
        site = Site(
            context=Context(source=source, folder=options.run),
            access=Access(),
            audit=Audit(hub.files.audit),
            files=assets(),
            live=hub,
            neighbours=lambda: neighbours(options.run, options.compared),
            compared=tuple(neighbours(options.run, options.compared))[: len(options.compared)],
            bookmark=_kept_by(hub, asyncio.get_running_loop()),
        )
        try:
            token_file = root / TOKEN_FILE if options.keeps_tokens else None
            page = Page(site, port=options.port, token_file=token_file)
        except OSError as error:
            raise ConfigError(
                f"{root / TOKEN_FILE} cannot be written ({error}); expected a folder that this user writes to"
            ) from None
        if options.token_file is not None:
            page.write_address(options.token_file, controls=options.says_control)
        options.say(page.line(str(options.run), live=hub.live, controls=options.says_control))
        if options.says_control:
            options.say(f"control token: {site.access.control}")
        listening = asyncio.create_task(site.sockets.listen())
        try:
            await page.run()
        finally:
            listening.cancel()
    finally:
        if page is not None:
            page.close()
        recording.close()


async def _opened(opens: Callable[[], Recording], *, wait: bool) -> Recording:
    until = asyncio.get_running_loop().time() + (FIRST_S if wait else 0)
    while True:
        try:
            return await asyncio.to_thread(opens)
        except ScopeError:
            if asyncio.get_running_loop().time() >= until:
                raise
            await asyncio.sleep(0.2)


def _kept_by(hub: Hub, loop: asyncio.AbstractEventLoop) -> Callable[[Bookmark], None]:
    """A hub's events belong to its loop; files, which may wait, to a thread."""

    def keep(mark: Bookmark) -> None:
        kept = add_bookmark(hub.files, mark.step, mark.text)
        loop.call_soon_threadsafe(hub.publish, {"k": "bookmark", **asdict(kept)})

    return keep


def neighbours(run: Path, others: Sequence[Path] = ()) -> Mapping[str, Callable[[], Context]]:
    """``others``, then runs with a recording beside ``run``, by the name of their folder, and how each is
    opened. Where names are alike a number follows."""
    own = run.resolve()
    found: dict[str, Callable[[], Context]] = {}
    for folder in map(Path.resolve, others):
        names = itertools.chain([folder.name], (f"{folder.name} ({n})" for n in itertools.count(2)))
        found[next(name for name in names if name not in found and name != own.name)] = _Neighbour(folder)
    with contextlib.suppress(OSError):
        for folder in sorted(own.parent.iterdir()):
            if len(found) >= MOST_RUNS:
                break
            if folder != own and folder.name not in found and folder.is_dir() and not folder.is_symlink():
                with contextlib.suppress(ScopeError, OSError):
                    existing_recording(folder)
                    found[folder.name] = _Neighbour(folder)
    return found


class _Neighbour:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> Context:
        try:
            recording = open_recording(self._folder)
        except ScopeError as error:
            raise KeyError(str(error)) from None
        return Context(source=RecordedSource(recording, self._folder.name), folder=self._folder)
