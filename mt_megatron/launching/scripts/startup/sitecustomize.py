"""Runs first in every interpreter below ``mt-megatron run``: any other sitecustomize, then ours."""

import importlib
import os
import sys


def _chain(folder: str) -> None:
    """Import the sitecustomize that this one stands before, if there is one."""
    ours = sys.modules.pop("sitecustomize", None)
    # Programs shall find neither this module nor the folder; children get it from the environment.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != folder]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def _prepare(root: str) -> None:
    """Import what is needed of the package without leaving its folder on the path."""
    sys.path.insert(0, root)
    try:
        from mt_megatron.launching.scripts.activation import prepare
    finally:
        sys.path.remove(root)
    prepare()


def _start() -> None:
    folder = os.path.realpath(os.path.dirname(__file__))
    try:
        _chain(folder)
    finally:
        # Another interpreter, which may be too old even to read the package, has another prefix.
        if os.environ.get("MT_MEGATRON_BACKEND") and os.environ.get("MT_MEGATRON_PREFIX") == sys.prefix:
            _prepare(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(folder)))))


_start()
