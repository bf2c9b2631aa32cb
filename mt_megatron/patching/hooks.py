"""Call back when a watched module has been executed, before the import that asked for it returns.

The finder leaves the search to the other finders and only puts an ``exec_module`` on the loader
*instance* they return, for one call. Spec and loader keep their identity and type, so resources,
``get_source``, reloading and pickling of specs are what they were.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any

from ..errors import PatchImportError

_OWN_LOADER = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)


class ImportHook:
    """A finder for ``sys.meta_path``; ``imported(module)`` runs in the importing thread, inside the
    import of that module and under no lock but that module's own."""

    is_patch_hook = True

    def __init__(self, watches: Callable[[str], bool], imported: Callable[[ModuleType], None]) -> None:
        self._watches = watches
        self._imported = imported
        self._thread = threading.local()
        self.hooked: set[str] = set()
        """Names that were found through this hook: their execution is called back."""

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take it out again; twice does no harm."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the finder that has the module, with a hooked loader."""
        searching: set[str] = self._thread.__dict__.setdefault("searching", set())
        if name in searching or not self._watches(name):
            return None
        searching.add(name)  # another hook may ask all finders again, this one among them
        try:
            spec = self._search(name, path, target)
        finally:
            searching.discard(name)
        if spec is not None and spec.loader is not None and not isinstance(spec.loader, type):
            self._hook(spec)
        return spec

    def _search(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _hook(self, spec: ModuleSpec) -> None:
        if not hasattr(spec.loader, "exec_module") or not hasattr(spec.loader, "__dict__"):
            raise PatchImportError(
                f"{spec.name} is patched, but its loader {type(spec.loader).__name__} has no exec_module "
                f"that could be followed, so nobody can tell when it is loaded: import it before patch()",
                name=spec.name,
            )
        if not isinstance(spec.loader, _OWN_LOADER):
            spec.loader = copy.copy(spec.loader)  # one zipimporter serves all modules of its archive
        self.hooked.add(spec.name)
        vars(spec.loader)["exec_module"] = _Execution(spec.loader, self._imported)


class _Execution:
    """Stands in for a loader's ``exec_module`` once."""

    def __init__(self, loader: Any, imported: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._imported = imported
        self._before = vars(loader).get("exec_module")

    def __call__(self, module: ModuleType) -> None:
        if self._before is None:
            del self._loader.exec_module
        else:
            self._loader.exec_module = self._before
        self._loader.exec_module(module)
        self._imported(module)

    def __reduce__(self) -> Any:
        # In another process nobody waits for this module; the loader's own method is what is left.
        return functools.partial, (type(self._loader).exec_module, self._loader)


def is_hook(code: CodeType) -> bool:
    """Whether a frame with this code is a hooked loader's, for who shows tracebacks."""
    return code is _Execution.__call__.__code__
