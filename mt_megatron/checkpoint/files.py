"""A checkpoint as a folder of files: names, checksums, completeness, what a kill leaves behind.

    SAVE/latest_checkpointed_iteration.txt   the newest complete one; written last
    SAVE/iter_0000100/                       complete, since it is renamed when all is in it
    SAVE/iter_0000100/mt_megatron.json       the manifest: progress, configuration, checksums
    SAVE/iter_0000100/COMPLETE               size and checksum of the manifest; the last file written
    SAVE/.iter_0000100.OWNER.partial/        being written, or what a kill left of it (HOST-PID-RANDOM)
    SAVE/run.lock                            who writes here (see ``run_lock``)

Nothing here knows torch or process groups.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "mt_megatron.json"
RUN_FOLDERS = ("checkpoints", "scan", "scope")
"""Parts of a run's folder."""

MARKER = "COMPLETE"

POINTS = ("writing", "written", "manifest", "marker", "moved_away", "renamed", "pointer", "pruning", "done")
"""The moments of a save between which a kill can fall, in order (see ``reached``)."""

reached_point: Callable[[str], None] | None = None
"""Called with each of ``POINTS`` as it is reached, if set: a test dies there."""

_FOLDER = re.compile(r"iter_(\d{7,})")
_MARKER_LINE = re.compile(r"mt_megatron\.json (\d+) ([0-9a-f]{8})\n([0-9a-f]{8})\n")
_CHUNK = 4 << 20
_SECONDS_FOR_READERS = 30.0
_POLL_SECONDS = 0.1


def reached(point: str) -> None:
    """Say that a save came to ``point``."""
    if reached_point is not None:
        reached_point(point)


def folder_name(iteration: int) -> str:
    """``iter_0000100``."""
    return f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder, by its name; None when it is no such name."""
    matched = _FOLDER.fullmatch(folder.name)
    return None if matched is None else int(matched.group(1))


def checksum(path: Path) -> dict[str, Any]:
    """``{"bytes": size, "crc32": eight hex digits}`` of a file, as the manifest holds it."""
    value, size = 0, 0
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
            size += count
    return {"bytes": size, "crc32": f"{value:08x}"}


def write_manifest(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the manifest and then the marker, each durably: with the marker the folder is complete."""
    content = (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    write_durably(folder / MANIFEST, content.decode())
    reached("manifest")
    line = f"{MANIFEST} {len(content)} {zlib.crc32(content):08x}\n"
    write_durably(folder / MARKER, f"{line}{zlib.crc32(line.encode()):08x}\n")
    reached("marker")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Raises ``CheckpointError`` when there is none, or when it or its marker is damaged. A checkpoint
    from before there were checksums has neither a marker nor ``files``.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint of mt_megatron: it has no {MANIFEST}. Give another "
            f"iter_* folder, or write its number into {LATEST}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error}") from error
    marked = _check_marker(folder, content)
    try:
        document: dict[str, Any] = json.loads(content)
    except ValueError as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: {error}. Give another iter_* folder"
        ) from error
    if "files" in document and not marked:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MARKER}. Give another iter_* folder"
        )
    return document


def _check_marker(folder: Path, content: bytes) -> bool:
    try:
        text = (folder / MARKER).read_bytes().decode("latin-1")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CheckpointError(f"{folder / MARKER} cannot be read: {error}") from error
    matched = _MARKER_LINE.fullmatch(text)
    if matched is None or f"{zlib.crc32(text[: text.index(chr(10)) + 1].encode()):08x}" != matched.group(3):
        raise CheckpointError(
            f"{folder / MARKER} is damaged: found {text!r}, expected the size and the checksum of {MANIFEST} "
            "and its own. Give another iter_* folder"
        )
    size, expected = int(matched.group(1)), matched.group(2)
    found = f"{zlib.crc32(content):08x}"
    if (len(content), found) != (size, expected):
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: found {len(content)} bytes with crc32 {found}, expected {size} "
            f"with {expected}. Give another iter_* folder"
        )
    return True


def damaged_files(
    folder: Path, document: Mapping[str, Any], *, reader: int = 0, readers: int = 1
) -> list[str]:
    """One line for each file that is not what the manifest says, of the share of one of ``readers``.

    The shares are about equally large, and every file is in one of them.
    """
    listed: Mapping[str, Mapping[str, Any]] = document.get("files", {})
    loads = [0] * readers
    found = []
    for name, entry in sorted(listed.items(), key=lambda item: (-item[1]["bytes"], item[0])):
        least = loads.index(min(loads))
        loads[least] += entry["bytes"] + 1
        if least != reader:
            continue
        path = folder / name
        try:
            actual = checksum(path)
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror or error}")
            continue
        if actual != entry:
            found.append(
                f"{path} is damaged: found {actual['bytes']} bytes with crc32 {actual['crc32']}, expected "
                f"{entry['bytes']} with {entry['crc32']}"
            )
    return found


def complete_checkpoints(directory: Path) -> list[Path]:
    """The folders below ``directory`` that say they are complete, oldest step first; none is read whole."""
    folders = [each for each in directory.glob("iter_*") if iteration_of(each) is not None]
    return sorted(
        (each for each in folders if (each / MANIFEST).is_file()), key=lambda f: iteration_of(f) or 0
    )


def run_root(named: Path | str) -> Path:
    """The folder of the run that a command is given: that folder, or a part of it: one of ``RUN_FOLDERS`` or
    a checkpoint."""
    path = Path(named)
    if iteration_of(path) is not None:
        path = path.parent
    # A run that saves to a folder of such a name has its parts, or its metrics, in there.
    is_part = path.name in RUN_FOLDERS and not any(
        (path / each).exists() for each in (*RUN_FOLDERS, "metrics.jsonl")
    )
    return path.parent if is_part else path


def save_folder(run: Path) -> Path:
    """The folder of checkpoints of ``run``: itself, or below it, where the launch scripts save."""
    both = (run, run / RUN_FOLDERS[0])
    return next((each for each in both if (each / LATEST).is_file() or complete_checkpoints(each)), run)


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that ``directory`` says is its newest; without a pointer, the one of the latest step.

    None when there is neither. Raises ``CheckpointError`` when the one that is named is not there or
    not complete.
    """
    folder = latest_named(directory)
    if folder is not None:
        read_manifest(folder)
    return folder


def latest_named(directory: Path) -> Path | None:
    """``latest_checkpoint`` without a look into it: it may be damaged."""
    pointer = directory / LATEST
    try:
        text = pointer.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        # A kill between the first checkpoint's rename and the pointer.
        complete = complete_checkpoints(directory)
        return complete[-1] if complete else None
    except OSError as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}") from error
    if not text.isdigit():
        raise CheckpointError(
            f"{pointer} says {text!r}, expected an iteration; write the number of one of the iter_* folders "
            f"into it{_those_there(directory)}, or start anew with another --save"
        )
    folder = directory / folder_name(int(text))
    if not folder.exists():
        raise CheckpointError(
            f"{pointer} names {folder.name}, which is not there; write the number of one of the iter_* "
            f"folders into it{_those_there(directory)}"
        )
    return folder


def pointed_at(folder: Path) -> bool:
    """Whether ``folder`` is complete and its directory says that it is the newest."""
    try:
        text = (folder.parent / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return False
    return text == str(iteration_of(folder)) and (folder / MARKER).is_file()


def resolve_checkpoint(path: Path) -> Path:
    """``path`` itself when it is a checkpoint, else the newest one of that folder of a run.

    Raises ``CheckpointError`` when there is neither.
    """
    if iteration_of(path) is not None:
        read_manifest(path)
        return path
    found = latest_checkpoint(save_folder(path))
    if found is None:
        raise CheckpointError(
            f"found no checkpoint in {path}: expected {LATEST} there, or the path of an iter_* folder"
        )
    return found


def _those_there(directory: Path) -> str:
    there = [each.name for each in complete_checkpoints(directory)]
    return f" (complete: {', '.join(there[-5:])})" if there else ""


def owner_name() -> str:
    """A name that no other run has: host, process and a random number. It is part of the names of what is
    not complete, so that another run knows whose it is."""
    host = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())[:64] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def publish(partial: Path, final: Path, owner: str) -> list[str]:
    """Give a complete ``partial`` its name and point ``LATEST`` at it.

    A checkpoint of that name is moved away first, to a name of ``owner``, and comes back if the rename
    fails; ``recover`` brings it back when the process died in between. One that another process reads
    (``retention.in_use``) is waited for, and stays, with an ``OSError``, where that takes too long.

    Returns a line for the log for each replaced checkpoint that could not be removed.
    """
    sync_folder(partial)
    replaced = final.with_name(f".{final.name}.{owner}.replaced")
    lines = [discard(replaced, final)]
    with _unread(final):
        if final.exists():
            final.rename(replaced)
            reached("moved_away")
        try:
            partial.rename(final)
        except OSError:
            if replaced.exists() and not final.exists():
                replaced.rename(final)
            raise
    sync_folder(final.parent)
    reached("renamed")
    write_durably(final.parent / LATEST, f"{iteration_of(final)}\n")
    reached("pointer")
    return [line for line in (*lines, discard(replaced, final)) if line is not None]


def discard(replaced: Path, final: Path) -> str | None:
    """Remove ``replaced``, a checkpoint that had the name ``final``, if it exists. Returns a line where a
    part of it stays."""
    if not replaced.exists():
        return None
    # ``recover`` would take a part that stays under the old name for a checkpoint. The new name is that of
    # no other folder: an earlier checkpoint of this step may have stayed as well.
    with suppress(OSError):
        replaced = replaced.rename(final.with_name(f".{final.name}.{owner_name()}.pruned"))
    return remove(replaced)


def remove(folder: Path) -> str | None:
    """Remove ``folder`` as far as possible. Returns a line for the log where a part of it stays, as on NFS
    while another process has a file of it open."""
    reason = ""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return None
    return (
        f"{folder} stays: it cannot be removed now ({reason}). No run needs it, and the next start with this "
        "--save tries again"
    )


@contextmanager
def _unread(final: Path) -> Iterator[None]:
    """Keep readers from beginning to read ``final``, which is waited for while one reads it. Raises
    ``OSError`` where that takes longer than ``_SECONDS_FOR_READERS``."""
    deadline = time.monotonic() + _SECONDS_FOR_READERS
    while True:
        try:
            lock = FileLock(final / MANIFEST)
        except OSError:  # Not there, or not to be written to: nothing can be locked.
            break
        with lock:
            if lock.state != "busy":
                yield
                return
        if time.monotonic() > deadline:
            raise OSError(
                f"another process reads {final}, which this one would replace; it stays as it was. Let that "
                "process end, or choose another --save"
            )
        time.sleep(_POLL_SECONDS)
    yield


def write_durably(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` holds either what it held before or all of it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a loss of power."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Make what ``path`` holds survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(directory: Path) -> None:
    """Make ``directory`` and write into it, so that a wrong one is found before training rather than
    after hours of it. Raises ``CheckpointError``."""
    probe = directory / f".writable.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {directory}: {error.strerror or error}; change --save"
        ) from error
