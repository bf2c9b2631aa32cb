"""Numbers for the strings and process groups that records refer to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .segments import Group

_MOST = 65_000
"""Records have 16 bits for a number; past this one string stands for all further ones."""

_MOST_KNOWN = 4_096

TOO_MANY = "(more names than a trace can hold)"


class Names:
    """Gives each string and each group a number, the same for the life of the process; thread-safe."""

    def __init__(self) -> None:
        self.strings: list[str] = [""]
        """By number; only grows."""
        self.groups: dict[int, Group] = {}
        """By number, from 1; only grows."""
        self._numbers = {"": 0}
        self._group_numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        # Hashing a thousand ranks with every event would cost more than the event. The tuple is kept, so
        # that its id is not given to another one.
        self._by_identity: dict[tuple[str, int], tuple[Sequence[int], int]] = {}
        self._lock = threading.Lock()

    def string(self, text: str) -> int:
        """The number of ``text``."""
        number = self._numbers.get(text)
        return self._new_string(text) if number is None else number

    def group(self, name: str, ranks: Sequence[int] | None = ()) -> int:
        """The number of the group of these global ``ranks``; 0 past 65,000 groups."""
        key = (name, id(ranks))
        known = self._by_identity.get(key)
        if known is not None and known[0] is ranks:
            return known[1]
        members = tuple(int(rank) for rank in ranks or ())
        with self._lock:
            number = self._group_numbers.get((name, members))
            if number is None:
                if len(self.groups) >= _MOST:
                    return 0
                number = len(self.groups) + 1
                self.groups[number] = Group(name=name, ranks=members)
                self._group_numbers[(name, members)] = number
            # Only what cannot change may be known by its identity; a caller that makes a new tuple each time
            # must not fill the memory.
            if isinstance(ranks, tuple):
                if len(self._by_identity) >= _MOST_KNOWN:
                    self._by_identity.clear()
                self._by_identity[key] = (ranks, number)
        return number

    def _new_string(self, text: str) -> int:
        with self._lock:
            number = self._numbers.get(text)
            if number is not None:
                return number
            if len(self.strings) >= _MOST:
                if TOO_MANY not in self._numbers:
                    self._numbers[TOO_MANY] = len(self.strings)
                    self.strings.append(TOO_MANY)
                return self._numbers[TOO_MANY]
            # The string first: whoever sees the number must find it in the table.
            self.strings.append(text)
            self._numbers[text] = len(self.strings) - 1
            return len(self.strings) - 1
