"""A training job on several machines, checked on the one where it is written down."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.validate.parallel import node_problems
from mt_megatron.training.init_from_hf import load_run
from mt_megatron.training.validate import problems

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,47}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """What to start, on how many machines."""

    options: tuple[str, ...]
    """Options of ``mt-megatron pretrain``."""

    nodes: int = 1
    """Machines."""

    processes_per_node: int = 1
    """Processes on each: one per device."""

    name: str = "mt-megatron"
    """The job's name where it is scheduled: small letters, digits, hyphens."""

    python: str = "python"
    """The interpreter on the machines."""

    max_restarts: int = 0
    """How often torchrun starts all processes again after a failure."""

    interface: str | None = None
    """Network interface of the collectives; None: theirs to find."""

    environment: tuple[tuple[str, str], ...] = ()
    """Variables to set on every machine."""

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.nodes * self.processes_per_node

    def variables(self) -> dict[str, str]:
        """``environment``, and what ``interface`` means to the collective libraries."""
        found = dict(self.environment)
        if self.interface is not None:
            for library in ("GLOO", "NCCL", "MCCL"):
                found.setdefault(f"{library}_SOCKET_IFNAME", self.interface)
        return found


def check_job(job: LaunchJob, *, restarts: bool) -> TrainingConfig:
    """The configuration of ``job``, when everything is right that can be known here.

    Data, tokenizer, checkpoints and packages may be on the machines alone and are not looked for.
    ``restarts`` says that the job may be started again, for which it must save. Raises ``ConfigError``.
    """
    found = [*_sizes(job), *_texts(job)]
    if found:
        raise ConfigError("\n".join(found))
    if not job.options:
        raise ConfigError(
            "nothing says what to train. Put options of mt-megatron pretrain after --, such as "
            "-- --model llama3_8b --config run.yaml"
        )
    config = load_run(job.options)
    found = problems(config, world_size=job.world_size, check_files=False)
    found += node_problems(config, job.world_size, job.processes_per_node)
    found = list(dict.fromkeys(found))
    if restarts and config.checkpoint.save is None:
        found.append(
            "save is not set for a job that may be started again; expected a directory that all machines "
            "share, or every start begins anew. Set --save."
        )
    if job.max_restarts > 0 and config.scan.scan_on_straggler != "continue":
        found.append(
            f"scan_on_straggler is {config.scan.scan_on_straggler} and --max-restarts is {job.max_restarts}: "
            "torchrun would start again on the same machines; expected no restart. Set --max-restarts 0."
        )
    if found:
        raise ConfigError(
            f"this job of {job.nodes} x {job.processes_per_node} processes cannot train:\n"
            + "\n".join(f"- {line}" for line in found)
        )
    return config


def _sizes(job: LaunchJob) -> list[str]:
    found = []
    for option, value, least in (
        ("--nodes", job.nodes, 1),
        ("--gpus-per-node", job.processes_per_node, 1),
        ("--max-restarts", job.max_restarts, 0),
    ):
        if value < least:
            found.append(f"{option} is {value}; expected at least {least}.")
    return found


def _texts(job: LaunchJob) -> list[str]:
    found = []
    if not _NAME.fullmatch(job.name):
        found.append(
            f"--job-name is {job.name!r}; expected at most 49 small letters, digits and hyphens, a letter "
            "first."
        )
    for name, _ in job.environment:
        if not _VARIABLE.fullmatch(name):
            found.append(f"--env has {name!r}; expected the name of a variable before the equals sign.")
    texts: Sequence[str] = (*job.options, job.python, *(value for _, value in job.environment))
    if any("\0" in text for text in texts):
        found.append("an option holds the character NUL, which no command line can; leave it out.")
    if job.interface is not None and not re.fullmatch(r"[^\s/\0]{1,15}", job.interface):
        found.append(f"--network-interface is {job.interface!r}; expected a name such as eth0.")
    return found
