"""Which backend a process and its children use, and for whose code: as environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from mt_megatron.config.watching import ScanConfig, ScopeConfig
from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint

BACKEND = "MT_MEGATRON_BACKEND"
SCOPE = "MT_MEGATRON_SCOPE"
"""Folders, separated like a path list."""
MODULES = "MT_MEGATRON_SCOPE_MODULES"
"""Dotted names, separated by commas."""
SCHEDULE = "MT_MEGATRON_PIPELINE_SCHEDULE"
"""The pipeline schedule, as ``--pipeline-schedule`` takes it; not set for Megatron-Core's own."""
LOG_FOLDER = "MT_MEGATRON_PIPELINE_LOG"
"""Folder for the decisions of the schedule ``auto``; ``mt_megatron.pipeline.policy.automatic`` reads it."""
TRANSPORT = "MT_MEGATRON_P2P_TRANSPORT"
"""The transport between pipeline stages, as ``--p2p-transport`` takes it; not set for Megatron-Core's own."""
CPU_BF16_PRODUCTS = "MT_MEGATRON_CPU_BF16_PRODUCTS"
"""The kernels of bf16 products on a CPU, as ``--cpu-bf16-products`` takes them; not set for torch's."""
MEGASCAN = "MT_MEGATRON_MEGASCAN"
MEGASCOPE = "MT_MEGATRON_MEGASCOPE"
MEGASCOPE_INTERVAL = "MT_MEGATRON_MEGASCOPE_INTERVAL"
RUN_DIR = "MT_MEGATRON_RUN_DIR"
"""What is recorded of the script and where, as the options of the same names take it; not set: nothing."""
PREFIX = "MT_MEGATRON_PREFIX"
"""``sys.prefix`` of the installation the choice was made for; other interpreters ignore it."""
MAIN = "MT_MEGATRON_MAIN"
"""Process id of the program that ``mt-megatron run`` became."""

STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What is recorded of a script."""

    run: Path
    """The folder of the run."""

    scan: str = ScanConfig.scan
    scope: str = ScopeConfig.scope
    interval: int = ScopeConfig.scope_interval


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What ``mt-megatron run`` was asked for."""

    backend: str
    folders: tuple[Path, ...] = ()
    modules: tuple[str, ...] = ()
    schedule: str | None = None
    transport: str | None = None
    cpu_bf16_products: str | None = None
    recorded: Recorded | None = None

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with the choice in it, and with the startup folder first on the path."""
        path = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry]
        scheduled = {} if self.schedule is None else {SCHEDULE: self.schedule}
        sent = {} if self.transport is None else {TRANSPORT: self.transport}
        products = {} if self.cpu_bf16_products is None else {CPU_BF16_PRODUCTS: self.cpu_bf16_products}
        recorded = (
            dict.fromkeys((MEGASCAN, MEGASCOPE), "off") if MEGASCAN in base or MEGASCOPE in base else {}
        )
        if (asked := self.recorded) is not None:
            recorded = {MEGASCAN: asked.scan, MEGASCOPE: asked.scope, RUN_DIR: str(asked.run)}
            recorded[MEGASCOPE_INTERVAL] = str(asked.interval)
        return {
            **base,
            **scheduled,
            **sent,
            **products,
            **recorded,
            BACKEND: self.backend,
            SCOPE: os.pathsep.join(map(str, self.folders)),
            MODULES: ",".join(self.modules),
            PREFIX: sys.prefix,
            MAIN: str(os.getpid()),
            "PYTHONPATH": os.pathsep.join([str(STARTUP), *(one for one in path if one != str(STARTUP))]),
        }

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Choice | None:
        """The choice that this process was started with; None when it is none of ours."""
        backend = environment.get(BACKEND)
        if not backend or environment.get(PREFIX) != sys.prefix:
            return None
        return cls(
            backend=backend,
            folders=tuple(Path(one) for one in environment.get(SCOPE, "").split(os.pathsep) if one),
            modules=tuple(one for one in environment.get(MODULES, "").split(",") if one),
            schedule=environment.get(SCHEDULE) or None,
            transport=environment.get(TRANSPORT) or None,
            cpu_bf16_products=environment.get(CPU_BF16_PRODUCTS) or None,
            recorded=recorded_of(environment),
        )


def is_main(environment: Mapping[str, str]) -> bool:
    """Whether this process is the program itself and none of its children."""
    return environment.get(MAIN) == str(os.getpid())


def recorded_of(wanted: Mapping[str, str]) -> Recorded | None:
    """What ``wanted``, by the names of the variables, asks to be recorded; None: nothing. Raises
    ``ConfigError``."""
    run, interval = wanted.get(RUN_DIR), wanted.get(MEGASCOPE_INTERVAL) or str(ScopeConfig.scope_interval)
    levels = {}
    for name, config, field in ((MEGASCAN, ScanConfig, "scan"), (MEGASCOPE, ScopeConfig, "scope")):
        known = get_args(get_type_hints(config)[field])
        levels[field] = wanted.get(name) or "off"
        if levels[field] not in known:
            raise ConfigError(
                f"found --{name.rpartition('_')[2].lower()} {levels[field]}; expected one of "
                f"{', '.join(known)}.{hint(levels[field], known)}"
            )
    if set(levels.values()) == {"off"}:
        return None
    if not run:
        raise ConfigError("found no folder for what is recorded; give --run-dir RUN")
    if Path(run).exists() and not Path(run).is_dir():
        raise ConfigError(f"found --run-dir {run}, which is no folder; give another")
    if not interval.isascii() or not interval.isdigit() or int(interval) < 1:
        raise ConfigError(f"found --megascope-interval {interval}; expected a number of steps from 1 on")
    return Recorded(run=Path(run).resolve(), interval=int(interval), **levels)
