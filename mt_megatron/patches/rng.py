"""On the CPU the host's generator is the device's, and Megatron need not be warned that it moves."""

from __future__ import annotations

import logging
from types import ModuleType

from ..backends.base import Backend
from ..backends.namespace import ModuleView
from ..patching.spec import Patch

_EXPECTED = "CPU RNG state changed within GPU RNG context"


def _without_the_warning(module: ModuleType) -> ModuleView:
    def get_logger(name: str | None = None) -> logging.Logger:
        logger = logging.Logger(name or "root")
        logger.parent = logging.getLogger(name)
        logger.addFilter(lambda record: record.getMessage() != _EXPECTED)
        return logger

    return ModuleView(module, {"getLogger": get_logger})


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="rng.one_generator",
            target="megatron.core.tensor_parallel.random:logging",
            kind="value",
            feature="device",
            backends=frozenset({"cpu"}),
            reason="forking the tracker warns that the CPU generator moved; here it is the device generator",
            body=_without_the_warning,
        )
    ]
