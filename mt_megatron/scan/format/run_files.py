"""Where a run's trace lies: the names of the files in ``RUN/scan/`` and who writes them.

run.json            rank 0: who is who (world size, layout, hosts)
control.json        what the ranks shall do; written by the command line, read by every rank
rank-00003/         one folder per rank
    000000.scan     its segments, in the order in which they were begun
    ended.json      how its recording ended; blank while it records
findings.jsonl      what the watcher found, one JSON object a line
alerts.jsonl        what was told to somebody
.group-readable     there: the group may read all of it
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.checkpoint.files import run_root
from mt_megatron.errors import NoTraceError, ScanError

from .permissions import grant, make_private_folder, open_private
from .records import FORMAT_VERSION

_RANK = re.compile(r"rank-(\d{5,})")
_SEGMENT = re.compile(r"(\d{6,})\.scan")


@dataclass(frozen=True)
class RunFiles:
    """The paths of one trace; nothing needs to exist."""

    root: Path
    """``RUN/scan``."""

    @property
    def run_json(self) -> Path:
        """Who is who."""
        return self.root / "run.json"

    @property
    def control(self) -> Path:
        """What the ranks shall do."""
        return self.root / "control.json"

    @property
    def findings(self) -> Path:
        """What the watcher found."""
        return self.root / "findings.jsonl"

    @property
    def alerts(self) -> Path:
        """What was told to somebody."""
        return self.root / "alerts.jsonl"

    def rank_folder(self, rank: int) -> Path:
        """Where ``rank`` writes."""
        return self.root / f"rank-{rank:05d}"

    def ranks(self) -> list[int]:
        """Ranks that have a folder, ascending."""
        if not self.root.is_dir():
            return []
        found = (_RANK.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in found if match)


def belongs_to(name: str, rank: int, world_size: int) -> bool:
    """Whether the entry ``name`` of a trace's folder is ``rank``'s to look after: its own folder, and for
    rank 0 whatever is no rank's of this run."""
    match = _RANK.fullmatch(name)
    of = int(match[1]) if match else 0
    return rank == (of if of < world_size else 0)


def run_files(run: Path | str) -> RunFiles:
    """The files of ``run``: a run's folder, or its ``scan`` folder itself."""
    path = Path(run)
    own = path.name == "scan" and not (path / "scan").is_dir()
    return RunFiles(path if own else path / "scan")


def existing_run(run: Path | str) -> RunFiles:
    """``run_files`` of a run that holds a trace. Raises ``NoTraceError`` when it holds none."""
    files = run_files(run_root(run))
    if not files.run_json.exists() and not files.ranks():
        raise NoTraceError(
            f"found no trace in {files.root}; expected run.json or folders rank-NNNNN there. Give the folder "
            "that a run with --scan base (or higher) wrote, or its 'scan' folder"
        )
    return files


def segment_paths(rank_folder: Path) -> list[Path]:
    """The segments of one rank, oldest first; one that is rotated away meanwhile may be gone."""
    if not rank_folder.is_dir():
        return []
    numbered = [
        (int(match[1]), path) for path in rank_folder.iterdir() if (match := _SEGMENT.fullmatch(path.name))
    ]
    return [path for _, path in sorted(numbered)]


def segment_path(rank_folder: Path, number: int) -> Path:
    """The name of segment ``number``."""
    return rank_folder / f"{number:06d}.scan"


def segment_number(path: Path) -> int:
    """The number in a segment's name."""
    match = _SEGMENT.fullmatch(path.name)
    if match is None:
        raise ScanError(f"found {path}; expected a segment's name such as 000000.scan")
    return int(match[1])


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Keep other processes and threads from changing ``path`` meanwhile, from before it is read until it is
    replaced: waits for those that are at it. On storage without locks nothing is kept out. Raises
    ``OSError`` where the lock's file, beside ``path``, cannot be made."""
    lock = path.with_name(f".{path.name}.lock")
    with FileLock(lock, create=True, wait=True, mode=0o600):
        grant(lock)
        yield


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, with the modes of its trace (``permissions``), that takes ``path``'s place when all
    went well and vanishes otherwise: readers see the old or the new, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        grant(Path(name))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_private(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8, as ``whole_file`` does."""
    with whole_file(path) as file:
        file.write(text.encode())


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append ``record`` to ``path`` as one line of JSON, whole or not at all: a part spoils the next one.
    For files of one writer. Raises ``OSError``."""
    handle = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(handle).st_size
        line = memoryview((json.dumps(record) + "\n").encode())
        try:
            while line:
                line = line[os.write(handle, line) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def write_run(files: RunFiles, facts: Mapping[str, Any]) -> None:
    """Write ``run.json``: ``facts`` (world_size, layout, ranks, started_unix_ns, model, num_microbatches,
    simulated ...) and the format's version."""
    make_private_folder(files.root)
    whole = {"format_version": FORMAT_VERSION, "simulated": False, **facts}
    write_private(files.run_json, json.dumps(whole, indent=1) + "\n")


def read_run(files: RunFiles) -> dict[str, Any]:
    """What ``write_run`` wrote. Raises ``ScanError`` when it is missing, damaged or of another version."""
    path = files.run_json
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScanError(
            f"found no {path}; rank 0 writes it when a traced run starts. Give the folder of such a run"
        ) from None
    except PermissionError:
        raise  # the command says who may read it
    except (OSError, ValueError) as error:
        raise ScanError(
            f"{path} cannot be read ({error}); copy it again from the machine of rank 0"
        ) from error
    if not isinstance(facts, dict) or facts.get("format_version") != FORMAT_VERSION:
        found = facts.get("format_version") if isinstance(facts, dict) else type(facts).__name__
        raise ScanError(
            f"{path}: found format version {found!r}, expected {FORMAT_VERSION}; read it with the version of "
            "mt_megatron that wrote it"
        )
    return facts
