"""What was written where, so that it can be written back: last in, first out, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import PatchError
from .places import Element, Key, Place


@dataclass(frozen=True)
class Entry:
    """``place`` held ``old`` and now holds ``new``, because of the patch with this id."""

    place: Place
    old: Any
    new: Any
    patch: str

    @property
    def key(self) -> tuple[Any, ...]:
        if isinstance(self.place, (Element, Key)):  # one container can hold several of ours
            return (*self.place.key, id(self.new))
        return self.place.key


class Journal:
    """Every write of one plan. Once closed it refuses further ones, so that an import that ends in
    another thread cannot patch behind the back of ``revert``."""

    def __init__(self) -> None:
        # Held only around single writes and around revert, never while anybody's code runs.
        self._lock = threading.RLock()
        self._entries: list[Entry] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def write(self, place: Place, old: Any, new: Any, patch: str) -> bool:
        """Exchange and remember; False when the journal was closed meanwhile."""
        with self._lock:
            if self._closed:
                return False
            if old is not new:
                place.swap(old, new)
                self._entries.append(Entry(place, old, new, patch))
            return True

    def forget_stale(self, module: ModuleType) -> None:
        """Drop the names of ``module`` that running its code again has overwritten."""
        with self._lock:
            stale = {
                entry.key
                for entry in self._top()
                if getattr(entry.place, "owner", None) is module and entry.place.state(entry.new) != "ours"
            }
            self._entries = [entry for entry in self._entries if entry.key not in stale]

    def revert(self, *, force: bool = False) -> list[str]:
        """Write everything back and close.

        Raises PatchError, and changes nothing, when somebody else has written over one of our
        values; with ``force`` such values are left alone and described in the answer.
        """
        with self._lock:
            foreign = [entry for entry in self._top() if entry.place.state(entry.new) == "other"]
            if foreign and not force:
                raise PatchError(
                    "cannot unpatch, nothing was changed: "
                    + "; ".join(f"{entry.place.describe()} (patch {entry.patch})" for entry in foreign)
                    + " was changed again after patch(); undo that change first"
                )
            self._closed = True
            lost = {entry.key for entry in foreign}
            while self._entries:
                entry = self._entries.pop()
                if entry.key not in lost and entry.place.state(entry.new) == "ours":
                    entry.place.swap(entry.new, entry.old)
            return [entry.place.describe() for entry in foreign]

    def _top(self) -> list[Entry]:
        last = {entry.key: entry for entry in self._entries}
        return list(last.values())
