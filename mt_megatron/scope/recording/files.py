"""Files of a run's recording in ``RUN/scope/`` and who writes them.

node-HOST-00000.sqlite   sidecar of node 0: what its ranks sent (``schema``)
node-HOST-00000.log      sidecar of node 0: its log
requests.json            page and ``mt-megatron scope watch``: what ranks record besides the defaults
bookmarks.json           page: steps that somebody marked
alerts.jsonl             sidecar of node 0: statistics that left their band, one JSON object a line
audit.jsonl              rank 0 and whoever serves the page: commands, refusals, what the lab does (``audit``)
run.lock                 rank 0 of the run that records here: locked, with its host and process (``lock``)
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.files import run_root
from mt_megatron.errors import ScopeError
from mt_megatron.scan.format.permissions import make_private_folder
from mt_megatron.scan.format.run_files import changing, write_private

FOLDER = "scope"

MOST_REQUESTS = 64
"""Texts in ``requests.json``."""

LONGEST_REQUEST = 512
"""Characters of one request."""

LONGEST_BOOKMARK = 200
"""Characters of a bookmark's text."""

MOST_CHARACTERS = 2**18
"""Of ``requests.json`` and of ``bookmarks.json`` as they are written."""

_MOST_READ = 4 * MOST_CHARACTERS
"""Escaped as ASCII, a file of the same texts is longer."""

_NODE = re.compile(r"node-(.+)-(\d{5,})\.sqlite")
_ESCAPED = re.compile(r"\\([0-7]{3})")
"""Blanks and backslashes in /proc/self/mountinfo."""

_LOCAL = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "tmpfs",
    "ramfs",
    "overlay",
    "bcachefs",
    "jfs",
}
"""File systems of one machine, as /proc/self/mountinfo names them."""


@dataclass(frozen=True)
class ScopeFiles:
    """Paths of one run's recording; nothing needs to exist."""

    root: Path
    """``RUN/scope``."""

    @property
    def requests(self) -> Path:
        """Requests for all ranks."""
        return self.root / "requests.json"

    @property
    def bookmarks(self) -> Path:
        """Marked steps."""
        return self.root / "bookmarks.json"

    @property
    def alerts(self) -> Path:
        """Statistics that left their band."""
        return self.root / "alerts.jsonl"

    @property
    def audit(self) -> Path:
        """Commands, refusals and what the lab does."""
        return self.root / "audit.jsonl"

    @property
    def lock(self) -> Path:
        """Lock of the run that records here."""
        return self.root / "run.lock"

    def node(self, host: str, number: int) -> Path:
        """File that the sidecar of node ``number`` writes."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", host)[:64] or "host"
        return self.root / f"node-{name}-{number:05d}.sqlite"

    def log(self, host: str, number: int) -> Path:
        """Log of that sidecar."""
        return self.node(host, number).with_suffix(".log")

    def nodes(self) -> list[Path]:
        """Files that are there, by number of the node, then host."""
        if not self.root.is_dir():
            return []
        found = [(_NODE.fullmatch(path.name), path) for path in self.root.iterdir()]
        return [path for _, path in sorted((int(match[2]), path) for match, path in found if match)]


def scope_files(run: Path | str) -> ScopeFiles:
    """Files of ``run``: a run's folder, or its ``scope`` folder itself."""
    path = Path(run)
    own = path.name == FOLDER and not (path / FOLDER).is_dir()
    return ScopeFiles(path if own else path / FOLDER)


def existing_recording(run: Path | str) -> ScopeFiles:
    """``scope_files`` of a run that has a recording. Raises ``ScopeError`` where it has none."""
    files = scope_files(run_root(run))
    if not files.nodes():
        raise ScopeError(
            f"found no recording in {files.root}; expected node-HOST-NNNNN.sqlite there. Give the folder "
            "of a run that was trained without --scope off, or its 'scope' folder"
        )
    return files


def read_requests(files: ScopeFiles) -> list[str]:
    """Requests for all ranks; none where there is no file. Raises ``ScopeError`` for a damaged file."""
    found = _read_json(files.requests)
    texts = [] if found is None else found.get("requests") if isinstance(found, dict) else None
    if not isinstance(texts, list):
        raise ScopeError(
            f'{files.requests}: expected {{"requests": [text, ...]}}; write it again or delete it'
        )
    return checked_requests(texts)


def write_requests(files: ScopeFiles, texts: Sequence[str], *, add: bool = False) -> list[str]:
    """Replace the requests for all ranks, or ``add`` to them; returns those in force. Sidecars read the file
    each second. Raises ``ScopeError`` for texts that are too many or too long and, with ``add``, for a
    damaged file, ``OSError`` where the file cannot be written."""
    make_private_folder(files.root)
    with changing(files.requests):
        whole = checked_requests([*(read_requests(files) if add else []), *texts])
        content = {"requests": whole, "changed_unix_ns": time.time_ns()}
        write_private(files.requests, json.dumps(content, indent=1) + "\n")
    return whole


def checked_requests(texts: Sequence[object]) -> list[str]:
    """``texts`` without repeats, if they are as few and short as a file may hold. Their grammar is checked by
    whoever asks and by the ranks. Raises ``ScopeError``."""
    if len(texts) > MOST_REQUESTS:
        raise ScopeError(f"found {len(texts)} requests; expected {MOST_REQUESTS} at most. Ask for fewer")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= LONGEST_REQUEST or not text.isprintable():
            raise ScopeError(
                f"found the request {str(text)[:40]!r}; expected printable text of 1 to "
                f"{LONGEST_REQUEST} characters"
            )
    return list(dict.fromkeys(str(text) for text in texts))


@dataclass(frozen=True, kw_only=True)
class Bookmark:
    """A step that somebody marked."""

    step: int
    text: str
    time_unix: float


def read_bookmarks(files: ScopeFiles) -> list[Bookmark]:
    """By step. Raises ``ScopeError`` for a damaged file."""
    found = _read_json(files.bookmarks)
    try:
        marks = [
            Bookmark(step=int(each["step"]), text=str(each["text"]), time_unix=float(each["time_unix"]))
            for each in _list(found)
        ]
    except (TypeError, KeyError, ValueError) as error:
        raise ScopeError(
            f"{files.bookmarks}: expected a list of step, text and time_unix; write it again or delete it"
        ) from error
    return sorted(marks, key=lambda mark: (mark.step, mark.time_unix))


def add_bookmark(files: ScopeFiles, step: int, text: str) -> Bookmark:
    """Mark ``step``; the same text at the same step stays one mark. Raises ``ScopeError`` for a text that is
    too long and for a mark too many, ``OSError`` where the file cannot be written."""
    if step < 0 or not 0 < len(text) <= LONGEST_BOOKMARK or not text.isprintable():
        raise ScopeError(
            f"found the bookmark {text[:40]!r} at step {step}; expected printable text of 1 to "
            f"{LONGEST_BOOKMARK} characters and a step of 0 or more"
        )
    mark = Bookmark(step=step, text=text, time_unix=time.time())
    with changing(files.bookmarks):
        others = [each for each in read_bookmarks(files) if (each.step, each.text) != (step, text)]
        whole = sorted([*others, mark], key=lambda each: (each.step, each.time_unix))
        written = json.dumps([vars(each) for each in whole], indent=1, ensure_ascii=False) + "\n"
        if len(written) > MOST_CHARACTERS:
            raise ScopeError(
                f"found {len(whole)} bookmarks of {len(written):,} characters; expected at most "
                f"{MOST_CHARACTERS:,} characters. Delete some of them in {files.bookmarks}"
            )
        write_private(files.bookmarks, written)
    return mark


def _list(found: object) -> list[Any]:
    if found is not None and not isinstance(found, list):
        raise TypeError("no list")
    return found or []


def _read_json(path: Path) -> object:
    try:
        # A link, or a pipe that somebody has put there, is not waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), encoding="utf-8") as file:
            text = file.read(_MOST_READ + 1)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ScopeError(f"{path} is no UTF-8 text; write it again or delete it") from error
    if len(text) > _MOST_READ:
        raise ScopeError(
            f"{path}: found more than {_MOST_READ:,} characters; expected at most {MOST_CHARACTERS:,}. "
            "Delete some of its entries"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScopeError(f"{path} is no JSON ({error}); write it again or delete it") from error


def keeps_shared_memory(folder: Path) -> bool:
    """Whether all readers of files in ``folder`` share memory with their writer, which SQLite's write-ahead
    log needs: not on file systems of a network, where readers run on other machines."""
    best, kind = -1, ""
    where = str(folder.resolve())
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                head, _, tail = line.partition(" - ")
                point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), head.split(" ")[4])
                inside = where == point or where.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= best:  # the last mount of a place hides those before it
                    best, kind = len(point), tail.split(" ")[0]
    except (OSError, IndexError):
        return False
    return kind in _LOCAL


def this_host() -> str:
    """Name of this machine."""
    return os.uname().nodename
