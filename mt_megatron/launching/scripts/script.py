"""What ``mt-megatron run`` is asked to run: found and checked before an interpreter is started for it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from mt_megatron.errors import RunError
from mt_megatron.patching.scope import is_installed

# The variables of a run of one process, for a script that torchrun did not start.

_IDENTITY = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables by which a starter tells how many processes it started."""


def rendezvous_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """What ``environment`` lacks of the variables that torchrun sets: the rank, the size, where to meet.

    Empty where the process is one of several (torchrun, srun, mpirun): each of them would otherwise be a
    run of its own. ``LOCAL_WORLD_SIZE`` is left to the script, which may start processes itself.
    """
    if any(environment.get(name, "1") != "1" for name in _SIZES):
        return {}
    if any(environment.get(name, value) != value for name, value in _IDENTITY.items()):
        return {}
    wanted = {**_IDENTITY, "MASTER_ADDR": "127.0.0.1"}
    missing = {name: value for name, value in wanted.items() if name not in environment}
    if "MASTER_PORT" not in environment:
        missing["MASTER_PORT"] = str(_free_port())
    return missing


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


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
