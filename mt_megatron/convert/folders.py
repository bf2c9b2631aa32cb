"""Source and destination folders of a conversion, checked before torch is imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.files import LATEST, folder_name, save_folder
from mt_megatron.config.hub_names import download_hint
from mt_megatron.errors import CheckpointError, ConfigError

CONFIG = "config.json"
"""Names a folder in Hugging Face's form."""

METADATA = ".metadata"
"""Names a distributed checkpoint."""

RECORD = ".mt_megatron_conversion.json"
"""In a result: what it was made of, so that the same command knows that nothing is left to do."""

_BEING_WRITTEN = (".converting", ".converting.lock")


def check_published(path: Path) -> None:
    """Raise ``CheckpointError`` unless ``path`` is a folder in Hugging Face's form."""
    if not path.is_dir():
        hint = download_hint(path)
        more = f". {hint}" if hint else ""
        raise CheckpointError(f"{path} is no folder here; expected one in Hugging Face's form{more}")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} has no {CONFIG}; expected a folder in Hugging Face's form")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ``CheckpointError``."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Give a complete copy of it") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds {type(document).__name__}, expected an object")
    return document


def megatron_folder(path: Path) -> Path:
    """The checkpoint that ``path`` is or names: itself, its newest, or the newest of a run's folder.

    Raises ``CheckpointError``.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; expected a Megatron checkpoint")
    saved = save_folder(path)
    folder = _newest(saved if (saved / LATEST).is_file() and not _is_checkpoint(path) else path)
    if not _is_checkpoint(folder):
        raise CheckpointError(
            f"{folder} is no Megatron checkpoint: it has neither {METADATA} (torch_dist) nor mp_rank_* "
            f"folders (torch), nor {LATEST}, which names the newest of several. Give the folder that --save "
            "named, or one iter_* folder in it"
        )
    return folder


def check_destination(source: Path, destination: Path) -> None:
    """Raise ``ConfigError`` where nothing may be written; a finished conversion passes."""
    if destination.resolve() == source.resolve():
        raise ConfigError(f"{destination} is the source as well; choose another destination")
    if destination.exists() and not destination.is_dir():
        raise ConfigError(f"{destination} is no folder; choose another destination")
    there = _held(destination)
    if there and not _records(destination):
        raise not_empty(destination, there[0].name)


def not_empty(destination: Path, name: str | None = None) -> ConfigError:
    """The error about a destination that holds something else than the result of this conversion."""
    if name is None:
        return ConfigError(
            f"{destination} is not empty: it holds another conversion, or this one with files changed since; "
            "choose another destination or empty it"
        )
    return ConfigError(
        f"{destination} is not empty (it holds {name}); choose another destination or empty it"
    )


def record_text(contents: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    """What ``RECORD`` holds: a hash of ``contents`` (source, options, versions) and the files' sizes."""
    sizes = {name: entry["bytes"] for name, entry in sorted(entries.items())}
    return json.dumps({"contents": _hash(contents), "files": sizes}, indent=1) + "\n"


def finished(folder: Path, contents: str) -> dict[str, int] | None:
    """Sizes of the files in ``folder`` when it is the finished result of ``contents``, else None."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        sizes: dict[str, int] = record["files"]
        same = record["contents"] == _hash(contents) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sizes if same else None


def holds_nothing(destination: Path) -> bool:
    """Whether ``destination`` is absent, empty, or holds only what an interrupted conversion left."""
    return not _held(destination)


def belongs(path: Path, destination: Path) -> bool:
    """Whether ``path`` is of the result or of its making: a destination may lie in the source's folder."""
    place, final = path.absolute(), destination.absolute()
    making = [final.with_name(f".{final.name}{ending}") for ending in _BEING_WRITTEN]
    return any(place.is_relative_to(each) for each in (final, *making))


def _held(destination: Path) -> list[Path]:
    if not destination.is_dir():
        return []
    return [each for each in destination.iterdir() if not each.name.endswith(_BEING_WRITTEN)]


def _records(destination: Path) -> list[Path]:
    return [*destination.glob(RECORD), *destination.glob(f"*/{RECORD}")]


def _is_checkpoint(folder: Path) -> bool:
    return (folder / METADATA).is_file() or any(folder.glob("mp_rank_*"))


def _newest(path: Path) -> Path:
    pointer = path / LATEST
    if not pointer.is_file():
        return path
    try:
        text = pointer.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}") from error
    if text != "release" and not text.isdigit():
        raise CheckpointError(f"{pointer} says {text!r}, expected a number or 'release'")
    folder = path / (text if text == "release" else folder_name(int(text)))
    if not folder.is_dir():
        raise CheckpointError(f"{pointer} names {folder.name}, which is not there")
    return folder


def _hash(contents: str) -> str:
    return hashlib.sha256(contents.encode()).hexdigest()
