"""Remember digests by path, modification time and size, in memory and in the user's cache folder."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .source import Definition, Parameter

_Key = tuple[int, int]
Known = tuple[Definition, str]
"""How a name is defined, and the digest of that."""


def default_path() -> Path:
    """``$XDG_CACHE_HOME/mt_megatron/digests-<python>.json`` (``~/.cache`` without the variable)."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root, "mt_megatron", f"digests-{sys.version_info[0]}.{sys.version_info[1]}.json")


class DigestCache:
    """Definitions and digests per file. A damaged, foreign or unwritable cache file is no error:
    it is as if nothing had been remembered, because everything in it can be computed again."""

    def __init__(self, path: Path | None, scheme: int) -> None:
        self._path = path
        self._scheme = scheme
        self._dirty = False
        self._stats: dict[str, _Key] = {}
        self._files: dict[str, dict[str, Any]] = self._load()

    def __getitem__(self, place: tuple[Path, str]) -> Known | None:
        """Of a file and a qualified name; None says that the file does not define it. Raises
        KeyError when nothing is remembered, or the file has changed since."""
        path, qualname = place
        entry = self._files[str(path)]
        if tuple(entry["key"]) != self._key(path):
            raise KeyError(place)
        return _decode(entry["names"][qualname])

    def __setitem__(self, place: tuple[Path, str], known: Known | None) -> None:
        path, qualname = place
        key = self._key(path)
        entry = self._files.get(str(path))
        if entry is None or tuple(entry["key"]) != key:
            entry = self._files[str(path)] = {"key": list(key), "names": {}}
        entry["names"][qualname] = None if known is None else {**asdict(known[0]), "digest": known[1]}
        self._dirty = True

    def save(self) -> None:
        """Write what was learned, atomically and readable by the owner alone."""
        if not self._dirty or self._path is None:
            return
        self._dirty = False
        files = {path: entry for path, entry in self._files.items() if os.path.exists(path)}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".digests-")  # is 0600
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"scheme": self._scheme, "files": files}, file)
                os.replace(temporary, self._path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            return

    def _key(self, path: Path) -> _Key:
        name = str(path)
        if name not in self._stats:
            found = path.stat()
            self._stats[name] = (found.st_mtime_ns, found.st_size)
        return self._stats[name]

    def _load(self) -> dict[str, dict[str, Any]]:
        if self._path is None:
            return {}
        try:
            with open(self._path, encoding="utf-8") as file:
                found = os.fstat(file.fileno())
                # What another user can write could hide a drift.
                if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return {}
                content = json.load(file)
            if content["scheme"] != self._scheme:
                return {}
            for entry in content["files"].values():
                tuple(entry["key"])
                for known in entry["names"].values():
                    _decode(known)
            return dict(content["files"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._dirty = True
            return {}


def _decode(known: dict[str, Any] | None) -> Known | None:
    if known is None:
        return None
    parameters = known["parameters"]
    definition = Definition(
        kind=known["kind"],
        segments=tuple((first, last) for first, last in known["segments"]),
        parameters=None if parameters is None else tuple(Parameter(**one) for one in parameters),
        decorators=tuple(known["decorators"]),
        imported_from=known["imported_from"],
    )
    str.encode(known["digest"])  # a TypeError here makes a damaged cache be ignored
    return definition, known["digest"]
