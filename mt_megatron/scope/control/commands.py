"""Commands on their way to a training: what one is, the queue of rank 0, and a folder to leave them in.

RUN/scope/commands/ID.json   a command ({"id", "do", "arguments"}), left by the command line
RUN/scope/results/ID.json    its answer ({"id", "ok", "value" or "error"})

The folder works without a sidecar and without packages; who may write into it may command the run, so that
it is for its owner alone (0700), and files of others are not obeyed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint
from mt_megatron.scan.format.permissions import make_private_folder
from mt_megatron.scan.format.run_files import write_private

NAMES = (
    "pause",
    "step",
    "resume",
    "hold",
    "status",
    "generate",
    "preview",
    "arm",
    "disarm",
    "undo",
    "pair",
    "request",
)
"""What can be commanded. ``hold``: a controller is there, a pause goes on. ``status`` and ``hold`` are
heard at once, the others at the next step boundary."""

AT_ONCE = frozenset({"hold", "status"})

MOST_BYTES = 1 << 20
"""Of one command."""

MOST_WAITING = 64
MOST_STEPS = 1_000_000
_KEPT_RESULTS = 100
_KEPT_BYTES = 64 * 2**20
_ID = re.compile(r"[A-Za-z0-9_.-]{1,80}")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command, checked."""

    id: str
    do: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"id": self.id, "do": self.do, "arguments": dict(self.arguments)}


def command_from(given: Any) -> Command:
    """The command that plain values describe. Raises ``ConfigError``."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"found {type(given).__name__}; expected a command: a map with id, do and arguments"
        )
    identity, do, arguments = str(given.get("id", "")), given.get("do"), given.get("arguments") or {}
    if not _ID.fullmatch(identity):
        raise ConfigError(f"found id {identity[:80]!r}; expected 1 to 80 letters, digits, '_', '.' and '-'")
    if do not in NAMES:
        raise ConfigError(
            f"found the command {do!r}; expected one of {', '.join(NAMES)}.{hint(str(do), NAMES)}"
        )
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise ConfigError(f"found arguments of {do} that are no map; expected names and values")
    if do == "step":
        steps = arguments.get("n", 1)
        if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
            raise ConfigError(f"found n: {steps!r}; expected a number of steps from 1 to {MOST_STEPS:,}")
    return Command(id=identity, do=str(do), arguments=dict(arguments))


def identity_of(given: Any) -> str:
    """The id to answer to; empty where ``given`` has none that a command may have."""
    identity = str(given.get("id", "")) if isinstance(given, Mapping) else ""
    return identity if _ID.fullmatch(identity) else ""


class Queue:
    """Commands that wait for the next step boundary; filled by any thread, emptied by the training thread."""

    def __init__(self) -> None:
        self._waiting: deque[Command] = deque()
        self._changed = threading.Condition()

    def put(self, command: Command) -> None:
        """Raises ``ConfigError`` when too many wait."""
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                raise ConfigError(
                    f"found {MOST_WAITING} commands waiting; expected fewer. Wait for a step to end"
                )
            self._waiting.append(command)
            self._changed.notify()

    def take(self, wait: float = 0.0) -> list[Command]:
        """All that wait; of none, those that come within ``wait`` seconds."""
        with self._changed:
            if not self._waiting and wait > 0:
                self._changed.wait(wait)
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def holds(self, names: Sequence[str]) -> bool:
        """True where one of these commands waits."""
        with self._changed:
            return any(each.do in names for each in self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)


class Spool:
    """The folder RUN/scope as rank 0 sees it."""

    def __init__(self, folder: Path) -> None:
        self._commands, self._results = folder / "commands", folder / "results"
        self._seen: tuple[int, int] | None = None

    def open(self) -> None:
        """Make the folders, and drop what an earlier session left. Raises ``OSError``."""
        make_private_folder(self._commands.parent)
        for each in (self._commands, self._results):
            try:
                each.mkdir(mode=0o700)  # a command that is left in a new one stays
            except FileExistsError:
                _empty(each)

    def look(self) -> list[Any]:
        """Contents of the commands left since the last look, oldest first; what is no JSON comes as its
        text."""
        try:
            found = os.lstat(self._commands)
        except OSError:
            return []
        if not stat.S_ISDIR(found.st_mode):
            return []  # a link, which somebody has put there meanwhile
        stamp = found.st_mtime_ns, found.st_ino
        # Within a clock tick of the change another one may follow without a new stamp.
        if stamp == self._seen and time.time_ns() - found.st_mtime_ns > 2_000_000_000:
            return []
        self._seen = stamp
        taken = []
        paths = [path for path in self._commands.iterdir() if path.suffix == ".json"]
        for path in sorted(paths, key=lambda each: (_mtime(each), each.name)):
            content = _read_own(path)
            with contextlib.suppress(OSError):
                path.unlink()
            if content is not None:
                taken.append(content)
        return taken

    def answer(self, identity: str, result: Mapping[str, Any]) -> None:
        """Leave the answer to ``identity``; older ones go. Nothing is raised."""
        if not _ID.fullmatch(identity):
            return
        with contextlib.suppress(OSError):
            write_private(self._results / f"{identity}.json", json.dumps(result, default=_plain))
            size = 0
            newest_first = sorted(self._results.glob("*.json"), key=_mtime, reverse=True)
            for number, path in enumerate(newest_first):
                size += path.stat().st_size
                if number and (number >= _KEPT_RESULTS or size > _KEPT_BYTES):
                    path.unlink(missing_ok=True)


def leave(folder: Path, do: str, arguments: Mapping[str, Any], *, name: str = "") -> str:
    """Leave a command in RUN/scope and return its id. Raises ``ConfigError`` for a wrong one and
    ``OSError``."""
    identity = f"{name or 'cli'}-{time.time_ns():x}-{secrets.token_hex(4)}"
    command = command_from({"id": identity, "do": do, "arguments": arguments})
    text = json.dumps(command.to_dict())
    if len(text) > MOST_BYTES:
        raise ConfigError(f"found a command of {len(text):,} bytes; expected at most {MOST_BYTES:,}")
    write_private(folder / "commands" / f"{identity}.json", text)
    return identity


def answered(folder: Path, identity: str) -> dict[str, Any] | None:
    """The answer to ``identity``; None while there is none."""
    try:
        found = json.loads((folder / "results" / f"{identity}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_listening(folder: Path) -> bool:
    """Whether a run may hear commands left in RUN/scope."""
    return (folder / "commands").is_dir()


def take_back(folder: Path, identity: str) -> bool:
    """Remove a command that nobody has taken; whether it was still there."""
    try:
        (folder / "commands" / f"{identity}.json").unlink()
    except OSError:
        return False
    return True


def _empty(path: Path) -> None:
    """Remove the files in the folder ``path`` and give it mode 0700. Raises ``OSError``, also for a link,
    whose target is left alone, and for a folder of another user."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(folder, 0o700)
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def _read_own(path: Path) -> Any:
    """JSON of a regular file of this user; None of any other."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MOST_BYTES:
        os.close(handle)
        return None
    with os.fdopen(handle, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data[:80].decode(errors="replace")


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _plain(value: Any) -> Any:
    listed = getattr(value, "tolist", None)
    return listed() if listed is not None else str(value)
