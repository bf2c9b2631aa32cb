"""Megatron-LM's scripts compile the dataset helpers at every start; compiled ones need no compiler."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_log = logging.getLogger("mt_megatron")


def _compile_unless_there(original: Callable[[], None]) -> None:
    try:
        importlib.import_module("megatron.core.datasets.helpers")
    except ImportError as error:
        _log.info("the dataset helpers are not compiled (%s): compiling them", error)
        original()


def patches(backend: Backend) -> list[Patch]:
    """For every backend."""
    return [
        Patch(
            id="training.compile_helpers",
            target="megatron.core.datasets.utils:compile_helpers",
            kind="wrap",
            feature="compat",
            reason="it runs make and a C++ compiler in the source tree, also where the module is compiled",
            body=_compile_unless_there,
            digest="abe5d4dc2213f44d03bae1302c76f73e3b4f759f362658088d2f42039f2ab0f8",
        )
    ]
