"""A sidecar in a thread of the test's process: everything but the interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from mt_megatron.scope.sidecar import sidecar as module
from mt_megatron.scope.sidecar.hub import Hub
from tests.scope.sidecar.fake_ranks import FakeRank, until

T = TypeVar("T")


@dataclass(kw_only=True)
class Beside:
    """What runs, and what it said."""

    run: Path
    socket: Path
    hub: Hub
    said: list[str]
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread
    ranks: list[FakeRank] = field(default_factory=list)

    def rank(self, *frames: Any) -> FakeRank:
        """A connection that has sent ``frames``; it is closed at the end."""
        self.ranks.append(FakeRank(self.socket, *frames))
        return self.ranks[-1]

    def ask(self, what: Coroutine[Any, Any, T]) -> T:
        """The result of ``what``, which runs in the sidecar's loop."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(20)

    def states(self) -> dict[int, dict[str, Any]]:
        """What the hub says of each rank."""

        async def now() -> dict[int, dict[str, Any]]:
            return {each.rank: vars(each) for each in self.hub.ranks()}

        return self.ask(now())

    def state(self, rank: int) -> dict[str, Any]:
        """What the hub says of ``rank``; of one that has not come that nothing is known."""
        return self.states().get(rank, dict.fromkeys(("step", "connected", "dropped_frames")))

    def end(self) -> None:
        """Close all connections and wait until everything is written."""
        for rank in self.ranks:
            rank.close()
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def beside(run: Path, **options: Any) -> Iterator[Beside]:
    """A sidecar of node 0 whose socket is there; it has ended afterwards. ``options``: of ``Options``."""
    folder = Path(tempfile.mkdtemp(prefix="mtscope-"))
    chosen = module.Options(run=run, socket=folder / "s", parent=None, **{"node": 0, **options})
    said: list[str] = []
    made: dict[str, Any] = {}

    def hub(*given: Any, **more: Any) -> Hub:
        made["hub"] = Hub(*given, **more)
        return made["hub"]

    async def main() -> None:
        made["stop"], made["loop"] = asyncio.Event(), asyncio.get_running_loop()
        await module.run_sidecar(chosen, said.append, made["stop"])

    def threaded() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - shown by the test
            made["error"] = error

    with patch.object(module, "Hub", hub):
        thread = threading.Thread(target=threaded)
        thread.start()
        until(lambda: chosen.socket.exists() or "error" in made)
    try:
        if "error" in made:
            raise made["error"]
        found = Beside(
            run=run,
            socket=chosen.socket,
            hub=made["hub"],
            said=said,
            loop=made["loop"],
            stop=made["stop"],
            thread=thread,
        )
        try:
            yield found
        finally:
            found.end()
        if "error" in made:
            raise made["error"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
