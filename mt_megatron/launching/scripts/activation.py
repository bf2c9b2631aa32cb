"""Patch this process when it first imports torch or Megatron, as its environment says.

Not earlier: most children of a training run (a tracker of resources, a compiler, a package
manager) never need torch, and a script may set variables that torch reads when it is imported.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from mt_megatron._session import MEGATRON_CORE
from mt_megatron.backends.loader_workers import spawned_are_patched
from mt_megatron.errors import MtMegatronError
from mt_megatron.launching.scripts.choice import BACKEND, Choice, is_main
from mt_megatron.launching.scripts.dataset_helpers import DatasetHelpers
from mt_megatron.launching.scripts.tracebacks import keep_clean
from mt_megatron.patching.hooks import ImportHook
from mt_megatron.patching.importlib_bootstrap import unwatch, watch
from mt_megatron.patching.scope import Scope


def prepare() -> None:
    """Called once, when the interpreter starts."""
    choice = Choice.of_environment(os.environ)
    if choice is not None:
        keep_clean()
        _Waiting(choice).start()


class _Waiting:
    """Stands on ``sys.meta_path`` until torch is there."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._scope = Scope(choice.modules, choice.folders)
        self._late = False
        self._hook = ImportHook(lambda name: name == "torch", self._torch_imported)

    def start(self) -> None:
        # Where another sitecustomize has imported torch, patching waits for the script's first
        # statement all the same: the script's folder is not on the path before.
        self._late = "torch" in sys.modules
        if not self._late:
            self._hook.install()
        sys.meta_path.insert(0, self)
        # The statement that imports torch is under way when the patches come, so what it returns
        # has to be looked at by somebody who was there before.
        watch(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds nothing; sees to it that torch and the patches come before Megatron."""
        if name == "megatron":
            import torch  # noqa: F401

            if self._late:
                self._activate()
        return None

    def see(
        self, module: ModuleType, names: Mapping[str, Any], wanted: Sequence[str], *, in_function: bool
    ) -> Any:
        """Every module is what it is; the patches' own rebinds come after this one."""
        if self._late and self._scope.covers(names):
            self._activate()
        return module

    def _torch_imported(self, torch: ModuleType) -> None:
        # It has been executed; only the import system does not say so yet.
        if torch.__spec__ is not None:
            torch.__spec__._initializing = False  # type: ignore[attr-defined]
        self._activate()

    def _activate(self) -> None:
        self._late = False
        self._hook.remove()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        activate(self._choice)
        unwatch(self)


def activate(choice: Choice) -> None:
    """Patch now; a failure ends the process, since nobody can use what is half a backend."""
    import mt_megatron

    DatasetHelpers(MEGATRON_CORE).install()
    spawned_are_patched()
    try:
        found = mt_megatron.patch(choice.backend, scope=(*choice.modules, *choice.folders))
    except MtMegatronError as error:
        _refuse(error)
    # ``auto`` is settled once, for all processes.
    os.environ[BACKEND] = found.backend
    if found.backend != "cuda":
        # Megatron-LM refuses to start without it; only the CUDA driver reads it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Deprecations in upstream's source, which nobody here can change; a filter of the user's comes before.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.", append=True)
    if is_main(os.environ) and os.environ.get("RANK", "0") == "0":
        print(f"mt-megatron: {found.summary()}", file=sys.stderr, flush=True)


def _refuse(error: MtMegatronError) -> NoReturn:
    print(f"mt-megatron: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
