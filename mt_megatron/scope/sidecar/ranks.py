"""The socket that the node's ranks send frames to, and their connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_megatron.errors import ScopeError
from mt_megatron.scope.format.frames import Decoder, FrameError, encode
from mt_megatron.scope.recording.checks import checked

from .hub import Hub, RankState
from .keeper import Keeper

LONGEST_PATH = 107
"""Bytes of a Unix socket's path, without the zero at its end."""

HELLO_SECONDS = 10.0
"""A connection that sends no hello for so long is closed."""

MOST_CLOSE_SECONDS = 6.0
"""At the end, for ranks of which something still comes."""

_READ_BYTES = 2**18
_MOST_UNSENT = 2**20
_MOST_CONNECTIONS = 4096
_FULL_PAUSE = 0.02


@dataclass(kw_only=True)
class _Rank:
    rank: int
    session: str
    writer: asyncio.StreamWriter | None
    ended: bool = False
    frames: int = 0
    bytes: int = 0
    step: int = -1


class Ranks:
    """Connections of the node's ranks, both ways. Nothing that a rank sends raises out of here."""

    def __init__(self, keeper: Keeper, hub: Hub, say: Callable[[str], None]) -> None:
        self._keeper = keeper
        self._hub = hub
        self._say = say
        self._ranks: dict[int, _Rank] = {}
        self._server: asyncio.AbstractServer | None = None
        self._path: Path | None = None
        self._requests: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._troubles = 0
        self.changed_at = time.monotonic()
        """When a connection last came or went."""

    async def listen(self, path: Path) -> None:
        """Make the socket. Raises ``ScopeError`` where it cannot be made or its folder is not private."""
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise ScopeError(
                f"the socket's path {path} has {len(os.fsencode(path))} bytes; expected {LONGEST_PATH} at "
                "most. Set TMPDIR to a shorter folder"
            )
        make_private(path.parent)
        await _free(path)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._connected, path, limit=_READ_BYTES)
        except OSError as error:
            raise ScopeError(f"the socket {path} cannot be made: {error}") from error
        finally:
            os.umask(before)
        os.chmod(path, 0o600)
        self._path = path

    async def close(self, seconds: float) -> None:
        """Read what ranks have sent, until nothing has come for ``seconds``, close all connections, remove
        the socket."""
        if self._server is not None:
            self._server.close()
        until, read = time.monotonic() + MOST_CLOSE_SECONDS, -1
        while self._tasks and time.monotonic() < until and read != self._read():
            read = self._read()
            await asyncio.wait(tuple(self._tasks), timeout=seconds)
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()

    def _read(self) -> int:
        return sum(each.frames for each in self._ranks.values())

    def all_ended(self, expected: int) -> bool:
        """Whether all ranks that came, and ``expected`` of them at least, said that they end."""
        return len(self._ranks) >= max(1, expected) and all(
            each.ended and each.writer is None for each in self._ranks.values()
        )

    def states(self) -> list[RankState]:
        """By rank."""
        dropped = self._keeper.dropped()
        return [
            RankState(
                rank=each.rank,
                connected=each.writer is not None,
                ended=each.ended,
                session=each.session,
                frames=each.frames,
                bytes=each.bytes,
                step=each.step,
                dropped_frames=dropped.get(each.rank, (0, 0))[0],
            )
            for _, each in sorted(self._ranks.items())
        ]

    def command(self, frame: Mapping[str, Any]) -> bool:
        """Send ``frame`` to global rank 0; False: it is not here."""
        rank = self._ranks.get(0)
        return rank is not None and self._send(rank, encode(frame))

    def watch(self, requests: list[str]) -> None:
        """Ask all ranks for ``requests``, and those that come later."""
        self._requests = requests
        frame = encode({"k": "watch", "requests": requests})
        for rank in self._ranks.values():
            self._send(rank, frame)

    def _send(self, rank: _Rank, frame: bytes) -> bool:
        writer = rank.writer
        if writer is None or writer.is_closing():
            return False
        if writer.transport.get_write_buffer_size() > _MOST_UNSENT:
            self._trouble(f"rank {rank.rank} reads nothing of what it is sent: its connection is closed")
            writer.transport.abort()  # a close would wait for what it does not read
            return False
        writer.write(frame)
        return True

    # One connection.

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        rank: _Rank | None = None
        try:
            if not _is_ours(writer) or len(self._tasks) > _MOST_CONNECTIONS:
                return
            decoder = Decoder()
            deadline = time.monotonic() + HELLO_SECONDS
            while True:
                left = None if rank is not None else deadline - time.monotonic()
                piece = await asyncio.wait_for(reader.read(_READ_BYTES), left)
                if not piece:
                    return
                for frame in decoder.feed(piece):
                    rank = self._greeted(frame, writer) if rank is None else self._took(rank, frame, writer)
                if rank is not None:
                    rank.bytes += len(piece)
                    while not self._keeper.has_room(rank.rank):
                        await asyncio.sleep(_FULL_PAUSE)
        except asyncio.TimeoutError:
            self._trouble("a connection that sent no hello is closed")
        except FrameError as error:
            self._trouble(f"{_whose(rank)} sent what cannot be read and is cut off: {error}")
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        except Exception as error:  # noqa: BLE001 - whatever one connection does, the others go on
            self._trouble(f"{_whose(rank)} is cut off: {type(error).__name__}: {error}")
        finally:
            self._tasks.discard(task)
            writer.close()
            if rank is not None and rank.writer is writer:
                rank.writer = None
                self._changed()

    def _greeted(self, frame: Mapping[str, Any], writer: asyncio.StreamWriter) -> _Rank:
        if frame.get("k") != "hello":
            raise FrameError(f"found a {str(frame.get('k'))[:40]!r} frame; expected hello first")
        hello = checked(frame)
        before = self._ranks.get(hello["rank"])
        if before is not None and before.writer is not None:
            before.writer.close()  # the rank has connected anew
        rank = _Rank(rank=hello["rank"], session=hello["session"], writer=writer)
        self._ranks[rank.rank] = rank
        self._keeper.put(rank.rank, frame)
        rank.frames += 1
        if self._requests:
            self._send(rank, encode({"k": "watch", "requests": self._requests}))
        self._changed()
        return rank

    def _took(self, rank: _Rank, frame: Mapping[str, Any], writer: asyncio.StreamWriter) -> _Rank:
        rank.frames += 1
        kind = frame.get("k")
        if kind == "result":
            try:
                self._hub.answered(checked(frame))
            except FrameError as error:
                self._trouble(f"an answer of rank {rank.rank} is left out: {error}")
        elif kind == "hello":
            # A new session in the same connection.
            hello = checked(frame)
            if hello["rank"] != rank.rank:
                raise FrameError(f"found the hello of rank {hello['rank']} in a connection of {rank.rank}")
            rank.session, rank.ended = hello["session"], False
            self._keeper.put(rank.rank, frame)
        else:
            if kind == "bye":
                rank.ended = True
                self._changed()
            step = frame.get("i")
            if isinstance(step, int) and not isinstance(step, bool):
                rank.step = step
            self._keeper.put(rank.rank, frame)
        return rank

    def _changed(self) -> None:
        self.changed_at = time.monotonic()
        self._hub.publish({"k": "ranks", "ranks": [vars(state) for state in self.states()]})

    def _trouble(self, text: str) -> None:
        self._troubles += 1
        if self._troubles <= 20:
            more = "; further ones are not told" if self._troubles == 20 else ""
            self._say(f"scope: {text}{more}")


def _whose(rank: _Rank | None) -> str:
    return "a connection" if rank is None else f"rank {rank.rank}"


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether the other side runs under this process's user."""
    connection = writer.get_extra_info("socket")
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except (AttributeError, OSError):
        return False
    return bool(struct.unpack("3i", raw)[1] == os.geteuid())


def make_private(folder: Path) -> None:
    """``folder``, made for its owner alone where it does not exist. Raises ``ScopeError`` where others may
    enter."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ScopeError(f"the socket's folder {folder} cannot be made: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ScopeError(
            f"the socket's folder {folder} has mode {stat.S_IMODE(found.st_mode):o}, owner {found.st_uid}; "
            f"expected 700 and {os.geteuid()}. Remove it, or set TMPDIR to a folder of your own"
        )


async def _free(path: Path) -> None:
    """Remove a socket that a killed sidecar left. Raises ``ScopeError`` where one still listens."""
    if not path.exists():
        return
    try:
        _, writer = await asyncio.wait_for(asyncio.open_unix_connection(path), 2.0)
    except (OSError, asyncio.TimeoutError):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    writer.close()
    raise ScopeError(f"another sidecar listens on {path}; end it, or start this run with another socket")
