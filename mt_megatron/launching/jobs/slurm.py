"""A Slurm batch script: one torchrun on each machine, saving before the time is over and going on after."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.job import LaunchJob

_TIME = re.compile(r"\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d+|\d+-\d+:\d{2}(:\d{2})?")
_WORD = re.compile(r"[A-Za-z0-9_.,:+@%/-]+")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What Slurm alone wants to know."""

    time: str | None = None
    """Limit in Slurm's forms (``2-00:00:00``). None: the partition's."""

    partition: str | None = None
    account: str | None = None
    cpus_per_node: int | None = None
    devices: bool = True
    """Whether to ask for GPUs: ``--gpus-per-node``."""

    save_before: int = 300
    """Seconds before the limit at which the run is told to save and end."""

    requeue: bool = True
    """Whether a run that had to end is put into the queue again."""

    exclude: tuple[str, ...] = ()
    """Hosts that the job is to do without."""


def slurm_script(job: LaunchJob, slurm: SlurmOptions) -> str:
    """The script, for ``sbatch``. Raises ``ConfigError`` for values that Slurm would not take."""
    _check(slurm)
    lines = ["#!/usr/bin/env bash", "# Made by mt-megatron launch --print slurm. Submit it: sbatch FILE"]
    lines += [f"#SBATCH {directive}" for directive in _directives(job, slurm)]
    lines += ["set -euo pipefail", "", *_NODES.format(nodes=job.nodes).splitlines(), ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.variables().items()]
    # Since 22.05 srun does not take it over from sbatch: the task would be bound to one core.
    cpus = "" if slurm.cpus_per_node is None else f" --cpus-per-task={slurm.cpus_per_node}"
    run = _RUN.format(nodes=job.nodes, cpus=cpus)
    lines += ["command=(", *_command(job), ")", "", *run.splitlines()]
    if slurm.requeue:
        lines += _REQUEUE.splitlines()
    return "\n".join([*lines, 'exit "$status"', ""])


def _check(slurm: SlurmOptions) -> None:
    found = []
    if slurm.time is not None and not _TIME.fullmatch(slurm.time):
        found.append(
            f"--time is {slurm.time!r}; expected one of Slurm's forms, such as 12:00:00 or 2-00:00:00."
        )
    for option, value in (("--partition", slurm.partition), ("--account", slurm.account)):
        if value is not None and not _WORD.fullmatch(value):
            found.append(f"{option} is {value!r}; expected letters, digits and . _ - + : @ % / alone.")
    if not all(_WORD.fullmatch(name) and "," not in name for name in slurm.exclude):
        found.append(
            f"--exclude-hosts lists {', '.join(slurm.exclude)}; expected names as Slurm knows them, of "
            "letters, digits and . _ - + : @ % / alone. Correct the list."
        )
    if slurm.cpus_per_node is not None and slurm.cpus_per_node < 1:
        found.append(f"--cpus-per-node is {slurm.cpus_per_node}; expected at least 1.")
    if not 1 <= slurm.save_before <= 65535:
        # Slurm keeps it in 16 bits.
        found.append(f"--save-before is {slurm.save_before}; expected 1 to 65535 seconds.")
    if found:
        raise ConfigError("\n".join(found))


def _directives(job: LaunchJob, slurm: SlurmOptions) -> list[str]:
    found = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--output=%x-%j.out",
        "--open-mode=append",
        # The script alone gets it; what srun starts would be ended by it.
        f"--signal=B:USR1@{slurm.save_before}",
        "--requeue" if slurm.requeue else "--no-requeue",
    ]
    optional = {
        "gpus-per-node": job.processes_per_node if slurm.devices else None,
        "cpus-per-task": slurm.cpus_per_node,
        "time": slurm.time,
        "exclude": ",".join(slurm.exclude) or None,
        "partition": slurm.partition,
        "account": slurm.account,
    }
    return found + [f"--{name}={value}" for name, value in optional.items() if value is not None]


def _command(job: LaunchJob) -> list[str]:
    lines = [
        f"    {shlex.quote(job.python)} -m mt_megatron.cli launch",
        f"    --nodes {job.nodes} --gpus-per-node {job.processes_per_node} --max-restarts {job.max_restarts}",
        f"    --python {shlex.quote(job.python)}",
        '    --master-addr "${nodes[0]}" --master-port "$((20000 + SLURM_JOB_ID % 20000))"',
        '    --rendezvous-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
        "    --",
    ]
    for option in job.options:
        # An option and its values share a line, for those who read it.
        if option.startswith("--") or lines[-1] == "    --":
            lines.append(f"    {shlex.quote(option)}")
        else:
            lines[-1] += f" {shlex.quote(option)}"
    return lines


_NODES = """\
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${{#nodes[@]}} != {nodes})); then
    echo "found ${{#nodes[@]}} nodes (${{nodes[*]}}); expected {nodes}" >&2
    exit 2
fi"""

_RUN = """\
step="" stopped=0
# The time is nearly over: training saves and ends by itself.
trap 'stopped=1; [[ -z $step ]] || kill -USR1 "$step"' USR1
trap '[[ -z $step ]] || kill -TERM "$step"' TERM
# A job that was submitted with --export=NONE, or on a site where that is usual, would hand nothing on.
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1{cpus} --export=ALL --kill-on-bad-exit=1 \\
    "${{command[@]}}" &
step=$!
while kill -0 "$step" 2>/dev/null; do
    # A signal ends the wait, not what is waited for.
    wait "$step" || true
done
status=0
wait "$step" || status=$?"""

_REQUEUE = """\
if ((stopped && status == 0)); then
    # The next start resumes from what was saved.
    scontrol requeue "$SLURM_JOB_ID"
fi"""
