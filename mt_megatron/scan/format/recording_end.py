"""How a rank's recording ended, in a file whose room was taken at its start: the disk may be full by then.

``rank-00003/ended.json`` is blank while the rank records. A rank that was killed leaves it blank; one whose
tracing failed says when and why, one that closed its trace in good order says that.
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

from .permissions import open_private

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

    def _fill(self, text: str) -> None:
        data = text.encode()[: _SIZE - 1].ljust(_SIZE - 1) + b"\n"
        done = 0
        while done < _SIZE:
            done += os.pwrite(self._file, data[done:], done)


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
