"""Whether a Megatron checkpoint is what was written, before a conversion signs it with checksums of its own.

A distributed checkpoint of the trainer has a manifest with the checksum of every file. Rank files are zip
archives with a checksum of every member. Other checkpoints have none, and that is said.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mt_megatron.checkpoint.files import MANIFEST, damaged_files, read_manifest
from mt_megatron.checkpoint.retention import in_use
from mt_megatron.convert.folders import METADATA
from mt_megatron.convert.rank_files.reader import rank_files
from mt_megatron.errors import CheckpointError

_CHUNK = 4 << 20

Say = Callable[[str], None]


@contextmanager
def read_safely(folder: Path, *, verify: bool, workers: int, say: Say) -> Iterator[None]:
    """Around the reading of the checkpoint ``folder``: it is not pruned meanwhile, and with ``verify`` it is
    compared with its checksums first. Raises ``CheckpointError`` that names every damaged file."""
    if not (folder / MANIFEST).is_file():
        # Of another program, which holds no lock and prunes nothing of ours.
        if verify:
            _verify(folder, workers, say)
        yield
        return
    with in_use(folder, say):
        if verify:
            _verify(folder, workers, say)
        yield


def _verify(folder: Path, workers: int, say: Say) -> None:
    found: list[str] | None
    if (folder / METADATA).is_file() or (folder / MANIFEST).is_file():
        found = _by_manifest(folder, workers)
    else:
        found = _by_archive(rank_files(folder), workers)
    if found is None:
        say(f"{folder} has no checksums: its files are taken as they are")
    elif found:
        raise CheckpointError(
            f"{folder} is damaged and was not converted:\n"
            + "\n".join(f"- {line}" for line in found)
            + "\nGive another checkpoint, or --no-verify-checkpoint to convert it all the same"
        )


def _by_manifest(folder: Path, workers: int) -> list[str] | None:
    if not (folder / MANIFEST).is_file():
        return None
    document = read_manifest(folder)
    if "files" not in document:
        return None
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify") as pool:
        shares = pool.map(
            lambda reader: damaged_files(folder, document, reader=reader, readers=workers), range(workers)
        )
        return [line for lines in shares for line in lines]


def _by_archive(paths: list[Path], workers: int) -> list[str] | None:
    archives = [path for path in paths if _has_checksums(path)]
    if not archives:
        return None
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify") as pool:
        return [line for line in pool.map(_damage_of_archive, archives) if line is not None]


def _has_checksums(path: Path) -> bool:
    """False for an archive that torch wrote without them (``set_crc32_options(False)``), which has zeros."""
    if not zipfile.is_zipfile(path):
        return _begins_as_zip(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError):
        return True
    return not members or any(member.CRC for member in members)


def _begins_as_zip(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(2) == b"PK"


def _damage_of_archive(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as stream:
                    # zipfile compares the checksum when it comes to the member's end.
                    while stream.read(_CHUNK):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        return f"{path} is damaged: {error}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None
