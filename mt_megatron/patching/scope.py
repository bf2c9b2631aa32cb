"""Which modules a redirection reaches: by dotted name, or by the folder their file lies in."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import PatchError
from .rebind import in_package

NEVER = frozenset({"mt_megatron", "numpy", "torch", "torch_musa"})
"""Top-level packages that are in no scope: what they see is the truth that views are made of."""

_INSTALLED = frozenset({"site-packages", "dist-packages"})


class Scope:
    """Dotted module-name prefixes and folders. Two scopes of the same parts are equal.

    A folder reaches the modules whose file lies below it, except installed ones (a virtual
    environment may lie there too), the standard library and the packages in ``NEVER``.
    """

    def __init__(self, prefixes: Iterable[str] = (), folders: Iterable[Path] = ()) -> None:
        self.prefixes = tuple(dict.fromkeys(prefixes))
        self.folders = tuple(dict.fromkeys(Path(os.path.abspath(folder)) for folder in folders))
        roots = {os.path.join(form, "") for one in self.folders for form in _forms(str(one))}
        self._roots = tuple(sorted(roots))
        self._known: dict[tuple[Any, Any], bool] = {}

    @classmethod
    def of(cls, entries: Iterable[str | Path]) -> Scope:
        """From what a caller names: identifiers with dots are prefixes, all else is a folder.

        Raises PatchError for one string instead of a list of them, a folder that does not exist,
        and a package that can be in no scope.
        """
        if isinstance(entries, (str, Path)) or not isinstance(entries, Iterable):
            raise PatchError(
                f"scope={entries!r} is one {type(entries).__name__}: expected a list, [{str(entries)!r}]"
            )
        prefixes: list[str] = []
        folders: list[Path] = []
        for entry in entries:
            if isinstance(entry, str) and all(part.isidentifier() for part in entry.split(".")):
                if entry.partition(".")[0] in NEVER:
                    raise PatchError(f"scope {entry!r}: {', '.join(sorted(NEVER))} can be in no scope")
                prefixes.append(entry)
            elif not Path(entry).is_dir():
                raise PatchError(
                    f"scope {str(entry)!r} is neither a dotted module name nor a folder that exists"
                )
            else:
                folders.append(Path(entry))
        return cls(prefixes, folders)

    def __bool__(self) -> bool:
        return bool(self.prefixes or self.folders)

    def __or__(self, other: Scope) -> Scope:
        return Scope((*self.prefixes, *other.prefixes), (*self.folders, *other.folders))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __repr__(self) -> str:
        return ", ".join((*self.prefixes, *map(str, self.folders))) or "nothing"

    def _parts(self) -> tuple[frozenset[str], frozenset[Path]]:
        return frozenset(self.prefixes), frozenset(self.folders)

    def names(self, module: str) -> bool:
        """Whether a module of this name is inside, whatever its file."""
        return any(in_package(module, prefix) for prefix in self.prefixes)

    def covers(self, names: Mapping[str, Any]) -> bool:
        """Whether the module with this ``__dict__`` is inside; decided once per name and file."""
        key = (names.get("__name__"), names.get("__file__"))
        try:
            return self._known[key]
        except KeyError:
            return self._known.setdefault(key, self._decide(*key))
        except TypeError:  # unhashable, so no module's
            return False

    def _decide(self, name: Any, file: Any) -> bool:
        if not isinstance(name, str) or name.partition(".")[0] in NEVER:
            return False
        if self.names(name):
            return True
        return isinstance(file, str) and self.reaches(file)

    def reaches(self, file: str) -> bool:
        """Whether one of the folders reaches a module of this file."""
        path = os.path.abspath(file)
        return path.startswith(self._roots) and not is_installed(path)


def is_installed(path: str) -> bool:
    """Whether an absolute path belongs to an installation rather than to the user."""
    return not _INSTALLED.isdisjoint(path.split(os.sep)) or path.startswith(_STANDARD_LIBRARY)


def _forms(path: str) -> tuple[str, ...]:
    plain = os.path.abspath(path)
    return tuple({plain, os.path.realpath(plain)})


_STANDARD_LIBRARY = tuple(
    {
        os.path.join(form, "")
        for name in ("stdlib", "platstdlib")
        for form in _forms(sysconfig.get_path(name) or sys.prefix)
    }
)
