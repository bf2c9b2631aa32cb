"""How a rank's recording ended, in a file whose room was taken at its start: the disk may be full by then.

``rank-00003/ended.json`` is blank while the rank records. A rank that was killed leaves it blank; one whose
tracing failed says when and why, one that closed its trace in good order says that. The recorder holds a lock
on the file, which ends with its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.errors import ScanError

from .permissions import open_private
from .run_files import RunFiles

NAME = "ended.json"

_SIZE = 4096
_LONGEST_REASON = 1000

How = Literal["failed", "closed"]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The last word of one rank's recorder."""

    how: How
    why: str
    """Of what failed: the error; else empty."""

    iteration: int
    """The step that began last."""

    time: int
    """ns of the rank's own clock."""

    time_unix: float
    session: int

    def note(self) -> dict[str, Any]:
        """As a note of the rank's trace, ``what="ended"``."""
        return {"what": "ended", **asdict(self)}

    def words(self) -> str:
        """``tracing ended at step 12, 2026-01-31 14:02:11 UTC: OSError: No space left on device``."""
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.time_unix))
        if self.how == "closed":
            return f"the trace was closed at step {self.iteration}, {when}"
        return f"tracing ended at step {self.iteration}, {when}: {self.why}"


class Ending:
    """The recorder's side: takes the room now, writes into it once."""

    def __init__(self, folder: Path, session: int) -> None:
        """``folder`` of the rank, which exists. Raises ``OSError``."""
        self._session = session
        # Not truncated: an earlier session's room is this one's, also where the disk is full.
        self._file = open_private(folder / NAME, os.O_RDWR | os.O_CREAT)
        # Shared: only a reader that looks for it (``may_record``) has it exclusively, for a moment.
        self._lock = FileLock(folder / NAME, shared=True, wait=True)
        try:
            self._fill("")
        except BaseException:
            self.close()
            raise

    def say(self, how: How, why: str, iteration: int) -> None:
        """Write it, unless something was said before. What fails here is nowhere else to be said."""
        if self._file < 0:
            return
        about = Ended(
            how=how,
            why=why[:_LONGEST_REASON],
            iteration=iteration,
            time=time.perf_counter_ns(),
            time_unix=time.time(),
            session=self._session,
        )
        with contextlib.suppress(OSError):
            self._fill(json.dumps(asdict(about)))
        self.close()

    def close(self) -> None:
        """Say nothing more."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
            self._lock.close()

    def _fill(self, text: str) -> None:
        data = text.encode()[: _SIZE - 1].ljust(_SIZE - 1) + b"\n"
        done = 0
        while done < _SIZE:
            done += os.pwrite(self._file, data[done:], done)


def require_recorder(files: RunFiles) -> None:
    """Raise ``ScanError`` where no process records to ``files``: each has ended or was killed."""
    if not any(may_record(files.rank_folder(rank)) for rank in files.ranks()):
        raise ScanError(
            f"no rank records to {files.root}: its run has ended, or was killed; expected one that "
            "trains with its trace on. Start it again; where file locks end at "
            "a machine, ask on one of the run's"
        )


def may_record(folder: Path) -> bool:
    """Whether a process records to ``folder``, a rank's, by its lock; True where there are no locks."""
    try:
        with FileLock(folder / NAME) as lock:
            return lock.state != "held"
    except FileNotFoundError:
        return False
    except OSError:
        return True


def read_ended(folder: Path, session: int) -> Ended | None:
    """What the recorder of ``session`` said last; None while it records, and of one that was killed."""
    try:
        with open(folder / NAME, "rb") as file:
            said = json.loads(file.read(_SIZE))
        found = _ended(said)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found.session == session else None


def ended_of(notes: list[dict[str, Any]]) -> Ended | None:
    """The last word among the notes of a trace."""
    for note in reversed(notes):
        if note.get("what") == "ended":
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return _ended(note)
    return None


def _ended(said: Mapping[str, Any]) -> Ended:
    return Ended(
        how="closed" if said["how"] == "closed" else "failed",
        why=str(said["why"]),
        iteration=int(said["iteration"]),
        time=int(said["time"]),
        time_unix=float(said["time_unix"]),
        session=int(said["session"]),
    )
