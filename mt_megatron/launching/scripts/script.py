"""What ``mt-megatron run`` is asked to run: found and checked before an interpreter is started for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from mt_megatron.errors import RunError
from mt_megatron.patching.scope import is_installed


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program as the python command line names it."""

    arguments: tuple[str, ...]
    """What follows the interpreter: ``script.py ...`` or ``-m module ...``."""

    path0: str
    """What python will put first on ``sys.path``."""

    folder: Path | None
    """Whose modules are in scope with it; None for an installed module."""


def find(command: Sequence[str]) -> Script:
    """Read ``SCRIPT [ARGS]`` or ``-m MODULE [ARGS]``. Raises RunError for what is not there."""
    if not command:
        raise RunError("nothing says what to run: end with -- SCRIPT [ARGS] or -- -m MODULE [ARGS]")
    if command[0] != "-m":
        return _file(command)
    if len(command) < 2:
        raise RunError("-m names no module: expected -m MODULE [ARGS]")
    return _module(command)


def _file(command: Sequence[str]) -> Script:
    path = Path(command[0])
    if not path.exists():
        raise RunError(f"there is no script {command[0]!r} here ({os.getcwd()}); check its path")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise RunError(f"{command[0]!r} is a folder without a __main__.py; name a script in it")
    real = path.resolve()
    folder = real if real.is_dir() else real.parent
    return Script(arguments=tuple(command), path0=str(folder), folder=folder)


def _module(command: Sequence[str]) -> Script:
    # Looked up without importing a parent package, whose code would run unpatched.
    top = command[1].partition(".")[0]
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None:
        raise RunError(
            f"there is no module {top!r} in {os.getcwd()} or on the path of {sys.executable}; install it, "
            f"or change into the folder that has it"
        )
    origin = spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)
    mine = origin is not None and origin.endswith((".py", os.sep + top)) and not is_installed(origin)
    folder = Path(origin).parent.resolve() if mine and origin is not None else None
    return Script(arguments=tuple(command), path0=os.getcwd(), folder=folder)
