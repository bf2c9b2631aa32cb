"""A folder that is written file by file, by several threads, and taken up again after a kill.

    PARENT/.NAME.converting.lock        locked by the process that writes; removed at its end
    PARENT/.NAME.converting/            being written
    PARENT/.NAME.converting/journal     what it is made of, then size and checksum of each complete file

A file has its name when it is complete; whoever takes up the work reads each one again before it
counts. Folders of other work than the same are not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.checkpoint.files import checksum, sync_folder
from mt_megatron.convert.checksums import combined
from mt_megatron.convert.folders import RECORD, finished, record_text
from mt_megatron.errors import CheckpointError

JOURNAL = "journal"

SCRATCH = ".state."
"""Begins the names of folders in it that are removed before the result is whole."""


@dataclass(frozen=True, kw_only=True)
class Summed:
    """A buffer whose CRC-32 is known."""

    content: Any
    crc32: int


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """A file to write."""

    name: str
    size: int
    """Bytes; an estimate is enough."""

    produce: Callable[[], Iterable[Any]] | None = None
    """Makes the buffers (or ``Summed`` ones) that it consists of, one at a time."""

    save: Callable[[Callable[[Any], int]], None] | None = None
    """The same for those who want to be given the function that writes a buffer."""


class OutputFolder:
    """The folder beside its final place until all is in it. A context: its end lets go of the lock, and an
    error before any file is complete removes the folder."""

    def __init__(self, final: Path, contents: str, say: Callable[[str], None]) -> None:
        """``contents`` identifies the work (source, options, version): only the same work is resumed.

        Raises ``CheckpointError`` when another process writes here.
        """
        self.final = final
        self.folder = final.with_name(f".{final.name}.converting")
        self.entries: dict[str, dict[str, Any]] = {}
        """Size and CRC-32 of each complete file by name; of a whole result that was left, sizes alone."""

        self.is_whole = False
        """True where it was left with all that belongs in it: only its name is missing."""

        self._contents = contents
        self._left: dict[str, dict[str, Any]] = {}
        self._parent_was_there = final.parent.exists()
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._lock = self._locked(say)
        try:
            self._take_up(contents, say)
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        useless = error is not None and not self.entries and not self._left
        if useless:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()
        if useless and not self._parent_was_there:
            with contextlib.suppress(OSError):
                self.final.parent.rmdir()

    def write(self, tasks: Sequence[FileTask], workers: int, progress: Callable[[int], None]) -> None:
        """Write every file that is not there yet, with ``workers`` threads; ``progress`` hears of bytes.

        An error in one ends all, and is raised.
        """
        self._stop.clear()
        pool = ThreadPoolExecutor(max_workers=max(1, min(workers, len(tasks))), thread_name_prefix="convert")
        # Large ones first, so that no thread is left alone with one at the end.
        ordered = sorted(tasks, key=lambda task: -task.size)
        futures = [pool.submit(self._one, task, progress) for task in ordered]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def write_text(self, name: str, text: str) -> None:
        """One small file."""
        content = text.encode()
        self.write([FileTask(name=name, size=len(content), produce=lambda: [content])], 1, lambda _: None)

    def drop_journal(self) -> None:
        """All is written: what only serves to take it up again goes."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        sync_folder(self.folder)

    def publish(self) -> None:
        """Give the folder its name. Raises ``CheckpointError`` when something is there by now."""
        if not self.is_whole:
            self.write_text(RECORD, record_text(self._contents, self.entries))
            del self.entries[RECORD]  # About the result, not part of it.
        # While the journal is there: without it the result would not be taken up again.
        if self.final.exists() and any(self.final.iterdir()):
            raise CheckpointError(
                f"{self.final} is no longer empty; the result stays in {self.folder}. Empty {self.final} and "
                "start the same command again"
            )
        self.drop_journal()
        if self.final.exists():
            self.final.rmdir()
        self.folder.rename(self.final)
        sync_folder(self.final.parent)

    def _locked(self, say: Callable[[str], None]) -> FileLock:
        path = self.folder.with_name(f"{self.folder.name}.lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path, create=True)
            while not lock.names_the_file():
                # Who held it has ended and removed it in between.
                lock.close()
                lock = FileLock(path, create=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be made: {error.strerror or error}") from error
        if lock.state == "busy":
            lock.close()
            raise CheckpointError(f"another process is writing {self.folder}; wait for it")
        if lock.state == "unsupported":
            say(
                f"nothing keeps a second process from writing {self.folder}: its storage has no file locks "
                f"({lock.reason}). Start no other conversion to it"
            )
        return lock

    def _unlock(self) -> None:
        # Only while it is held: afterwards it may be another's.
        self._lock.path.unlink(missing_ok=True)
        self._lock.close()

    def _take_up(self, contents: str, say: Callable[[str], None]) -> None:
        journal = self.folder / JOURNAL
        whole = None if journal.exists() else finished(self.folder, contents)
        if whole is not None:
            # A kill between the journal's end and the new name, when all files are on the disk.
            self.is_whole = True
            self.entries = {name: {"bytes": size} for name, size in whole.items()}
            say(f"{self.folder} holds the whole result and gets its name")
            return
        lines = []
        if journal.exists():
            for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    break  # A kill in the middle of a line: what follows it does not count.
        known = bool(lines) and isinstance(lines[0], dict) and lines[0].get("contents") == contents
        if known:
            self._left = {line["file"]: line["entry"] for line in lines[1:]}
            for each in self.folder.glob(f"{SCRATCH}*"):
                shutil.rmtree(each)  # A kill leaves it, and it is no part of the result.
            say(f"taking up {self.folder}, where {len(self._left)} files are complete")
        elif any(self.folder.iterdir()):
            if not lines:
                raise CheckpointError(
                    f"{self.folder} is there and has no {JOURNAL} of a conversion: remove it, or choose "
                    "another destination"
                )
            say(f"{self.folder} was left by another conversion: starting anew")
            for each in self.folder.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        with open(journal, "w", encoding="utf-8") as stream:
            stream.write(json.dumps({"contents": contents}) + "\n")
            for name, entry in self._left.items():
                stream.write(json.dumps({"file": name, "entry": entry}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _one(self, task: FileTask, progress: Callable[[int], None]) -> None:
        path = self.folder / task.name
        left = self._left.get(task.name)
        if left is not None and path.is_file() and checksum(path) == left:
            self.entries[task.name] = left
            progress(left["bytes"])
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        try:
            with open(temporary, "wb", buffering=0) as stream:
                sink = _Sink(stream, self._stop, progress)
                if task.save is not None:
                    task.save(sink.write)
                for buffer in task.produce() if task.produce is not None else ():
                    sink.write(buffer)
                os.fsync(stream.fileno())
            temporary.replace(path)
        except _Stopped:
            return
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
        sync_folder(path.parent)
        self._complete(task.name, {"bytes": sink.size, "crc32": f"{sink.crc32:08x}"})

    def _complete(self, name: str, entry: dict[str, Any]) -> None:
        with self._mutex:
            self.entries[name] = entry
            with open(self.folder / JOURNAL, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"file": name, "entry": entry}) + "\n")
                stream.flush()
                os.fsync(stream.fileno())


class _Stopped(Exception):
    """Another file failed."""


class _Sink:
    """Counts and sums what it writes."""

    def __init__(self, stream: Any, stop: threading.Event, progress: Callable[[int], None]) -> None:
        self._stream = stream
        self._stop = stop
        self._progress = progress
        self.size = 0
        self.crc32 = 0

    def write(self, buffer: Any) -> int:
        if self._stop.is_set():
            raise _Stopped
        view = memoryview(buffer.content if isinstance(buffer, Summed) else buffer)
        written = 0
        while written < view.nbytes:
            written += self._stream.write(view[written:])
        if isinstance(buffer, Summed):
            self.crc32 = combined(self.crc32, buffer.crc32, view.nbytes)
        else:
            self.crc32 = zlib.crc32(view, self.crc32)
        self.size += view.nbytes
        self._progress(view.nbytes)
        return view.nbytes
