"""What goes from a folder of checkpoints: what a kill left half done, and what newer ones supersede.

SAVE/.iter_0000100.HOST-PID-RANDOM.partial/    being written, or what a kill left of it
SAVE/.iter_0000100.HOST-PID-RANDOM.replaced/   about to be replaced by a new one of the same step
SAVE/.iter_0000100.HOST-PID-RANDOM.pruned/     being removed, superseded or replaced
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mt_megatron.checkpoint import files
from mt_megatron.checkpoint.file_locks import GONE, FileLock
from mt_megatron.checkpoint.write import Task
from mt_megatron.config.schema import CheckpointConfig
from mt_megatron.errors import CheckpointError

_HIDDEN = re.compile(
    r"\.(?P<final>iter_\d{7,})(?:\.(?P<owner>[A-Za-z0-9_-]+))?\.(?P<kind>partial|replaced|pruned)"
)
_OWNER = re.compile(r"(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")
_SECONDS_TO_MOVE = 10.0
_POLL_SECONDS = 0.05

Say = Callable[[str], None]


def _nothing(line: str) -> None:
    """Takes a line and does not say it."""


def recover(directory: Path, *, alone: bool = True, say: Say = _nothing) -> None:
    """Tidy up after a run that was killed: a checkpoint that was about to be replaced gets its name
    back, and half-written and half-removed ones go.

    ``alone``: this process holds the lock of ``directory``, so that no other run writes there. Without
    it, what belongs to a process of this host that lives, or to another host, stays. ``say`` names each
    folder that stays, one that cannot be removed included.
    """
    if not directory.is_dir():
        return
    for hidden in sorted(directory.glob(".iter_*")):
        matched = _HIDDEN.fullmatch(hidden.name)
        if matched is None:
            continue
        final, kind = directory / matched["final"], matched["kind"]
        whose = None if alone else _owner(matched["owner"])
        if whose == "alive" or (whose == "unknown" and kind == "partial"):
            say(f"{hidden} stays: it may be another run's, since {directory} has no file locks")
        elif kind == "replaced" and not final.exists():
            hidden.rename(final)
        elif whose == "unknown" and kind == "replaced":
            say(f"{hidden} stays: it may be another run's, since {directory} has no file locks")
        else:
            # A start does not fail by a folder that no run needs. What stays of a replaced one must not get
            # the name back once the checkpoint that replaced it is gone.
            stays = files.discard(hidden, final) if kind == "replaced" else files.remove(hidden)
            if stays is not None:
                say(stays)


def _owner(name: str | None) -> str:
    """``alive``, ``ended`` or ``unknown``, of the process that a hidden folder's name tells."""
    matched = None if name is None else _OWNER.fullmatch(name)
    here = _OWNER.fullmatch(files.owner_name())
    if matched is None or here is None or matched["host"] != here["host"]:
        return "unknown"
    return "alive" if is_alive(int(matched["process"])) else "ended"


def is_alive(process: int) -> bool:
    """Whether there is such a process on this host, of whatever user, other than this one."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def prune(
    directory: Path,
    *,
    keep_last: int | None,
    retain_interval: int | None,
    proven: int | None = None,
    say: Say = _nothing,
) -> list[Path]:
    """Remove superseded checkpoints; returns those that are gone under their names. ``say`` names each folder
    that cannot be removed; the others go all the same.

    Kept are the newest one (the step ``proven``, or that of ``LATEST``), the ``keep_last`` latest steps up to
    it, the first step from each multiple of ``retain_interval`` on (saves by the clock fall on none), steps
    of another branch of the run (later ones, and those that the newest one's manifest names as
    ``left_behind``), which this one did not supersede, and any that a process is reading. None of both
    options keeps all.
    """
    if keep_last is None and retain_interval is None:
        return []
    newest = int((directory / files.LATEST).read_text(encoding="utf-8")) if proven is None else proven
    others = left_behind(directory / files.folder_name(newest))
    candidates = [
        folder
        for folder in files.complete_checkpoints(directory)
        if (files.iteration_of(folder) or 0) <= newest and files.iteration_of(folder) not in others
    ]
    retained = {0: 0}
    """Multiple of the interval -> the first step from it on."""

    removed = []
    for folder in candidates[: -(keep_last or 1)]:
        iteration = files.iteration_of(folder) or 0
        if retain_interval is not None:
            retained.setdefault(iteration // retain_interval, iteration)
        if iteration == newest or iteration in retained.values():
            continue
        # No other folder's name: an earlier checkpoint of this step may have stayed.
        hidden = folder.with_name(f".{folder.name}.{files.owner_name()}.pruned")
        with _unused(folder, say) as free:
            if not free:
                continue
            files.reached("pruning")
            try:
                folder.rename(hidden)
            except OSError as error:
                say(f"{folder} stays: it cannot be renamed to be removed ({error.strerror})")
                continue
        removed.append(folder)
        # A folder that stays does not keep the others from going.
        stays = files.remove(hidden)
        if stays is not None:
            say(stays)
    return removed


def left_behind(folder: Path) -> frozenset[int]:
    """Steps beside ``folder`` that lie on branches which its run has gone back from; none where its manifest
    cannot be read."""
    try:
        steps = files.read_manifest(folder).get("left_behind")
    except CheckpointError:
        return frozenset()
    return frozenset(each for each in steps or () if isinstance(each, int))


def supersedes(options: CheckpointConfig) -> bool:
    """Whether older checkpoints go at all."""
    return options.save_keep_last is not None or options.save_retain_interval is not None


class Retention:
    """When superseded checkpoints of one run go: once the one that supersedes them is known to be sound.

    That is when a step trained from its weights, or one after them, was applied, or when it was read back.
    For rank 0; the files are removed by a thread.
    """

    def __init__(self, options: CheckpointConfig, say: Say) -> None:
        """``say`` takes lines for the log."""
        self._options = options
        self._say = say
        self._directory = Path(options.save or ".")
        self._newest: Path | None = None
        self._removing: Task | None = None

    def superseding(self, folder: Path) -> None:
        """``folder`` is complete; nothing shows yet that it is sound."""
        if folder.absolute().parent == self._directory.absolute() and supersedes(self._options):
            self._newest = folder

    def proven(self) -> None:
        """The checkpoint of the last ``superseding`` is sound: what it supersedes is removed."""
        newest, self._newest = self._newest, None
        if newest is None:
            return
        self.close()
        self._removing = Task(lambda: self._remove(files.iteration_of(newest)), "checkpoint-prune")

    def close(self) -> None:
        """Wait until what is being removed is gone."""
        task, self._removing = self._removing, None
        for line in task.result() if task is not None else ():
            self._say(f"note: {line}")

    def _remove(self, proven: int | None) -> list[str]:
        lines: list[str] = []
        try:
            prune(
                self._directory,
                keep_last=self._options.save_keep_last,
                retain_interval=self._options.save_retain_interval,
                proven=proven,
                say=lines.append,
            )
        except OSError as error:
            lines.append(f"older checkpoints could not be removed: {error}")
        return lines


@contextmanager
def in_use(folder: Path, say: Say = _nothing) -> Iterator[None]:
    """Keep ``folder`` from being pruned or replaced by another process meanwhile; ``say`` hears why that is
    not possible where the storage has no file locks."""
    with _shared(folder / files.MANIFEST) as lock:
        if lock.state == "unsupported":
            say(
                f"{folder} is read without a lock, which its storage does not give ({lock.reason}): a run "
                "that saves there may remove or replace it meanwhile"
            )
        elif lock.state == "busy":
            say(
                f"{folder} is read without a lock: another process has held it for {_SECONDS_TO_MOVE:g} s, "
                "and may remove or replace the folder meanwhile"
            )
        yield


def _shared(path: Path) -> FileLock:
    """A reader's lock on ``path``. A writer holds it for the moment in which the folder is moved; for a part
    of that nothing lies there, and afterwards another one may. Raises ``OSError`` where nothing comes."""
    deadline = time.monotonic() + _SECONDS_TO_MOVE
    while True:
        is_late = time.monotonic() > deadline
        try:
            lock = FileLock(path, shared=True)
        except OSError as error:
            if is_late or error.errno not in GONE or not _is_moved(path.parent):
                raise
        else:
            if is_late or (lock.state != "busy" and lock.names_the_file()):
                return lock
            lock.close()
        time.sleep(_POLL_SECONDS)


def _is_moved(folder: Path) -> bool:
    """True where a checkpoint of the same step lies beside ``folder`` under a hidden name."""
    return any(folder.parent.glob(f".{folder.name}.*"))


@contextmanager
def _unused(folder: Path, say: Say) -> Iterator[bool]:
    try:
        lock = FileLock(folder / files.MANIFEST)
    except OSError as error:
        say(f"{folder} is not removed: {files.MANIFEST} cannot be opened to be locked: {error.strerror}")
        yield False
        return
    with lock:
        if lock.state == "unsupported":
            say(
                f"{folder.name} is removed without a look whether another process reads it: {folder.parent} "
                f"has no file locks ({lock.reason})"
            )
        yield lock.state != "busy"
