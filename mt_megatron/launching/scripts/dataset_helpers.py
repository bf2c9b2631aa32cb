"""The compiled dataset helpers of the installed megatron-core, for a source tree that has none.

A checkout of Megatron-LM holds their C++ source only and compiles it inside of itself. The wheel of
the same version has them compiled, so a checkout needs neither a compiler nor to be written to.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

NAME = "megatron.core.datasets.helpers"


class DatasetHelpers:
    """The last finder on ``sys.meta_path``: asked when nobody else has the module."""

    def __init__(self, version: str) -> None:
        self._version = version

    def install(self) -> None:
        sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The extension module in the installed distribution, if it is of the right version."""
        if name != NAME:
            return None
        file = self._file()
        return None if file is None else spec_from_file_location(name, file)

    def _file(self) -> Path | None:
        try:
            installed = distribution("megatron-core")
        except PackageNotFoundError:
            return None
        if installed.version != self._version:
            return None
        folder = Path(str(installed.locate_file("megatron/core/datasets")))
        names = (f"helpers{suffix}" for suffix in EXTENSION_SUFFIXES)
        return next((folder / name for name in names if (folder / name).is_file()), None)
