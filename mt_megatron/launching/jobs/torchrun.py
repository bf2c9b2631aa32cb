"""The torchrun command line of one machine of a job."""

from __future__ import annotations

from dataclasses import dataclass

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.job import LaunchJob

DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the machines of a job find each other."""

    address: str
    """A name or address of the first machine that all of them reach; IPv6 without brackets."""

    port: int = DEFAULT_PORT
    identity: str = "mt-megatron"
    """What tells this job's meeting from another one's on the same port."""

    hosts_it: bool | None = None
    """Whether this machine is the first one; None: torchrun finds out by the address."""

    own_address: str | None = None
    """How the others reach this machine; None: by its host name."""

    def options(self) -> list[str]:
        """The options of torchrun. Raises ``ConfigError`` for what it cannot take."""
        if "%" in self.address:
            raise ConfigError(
                f"the first machine's address is {self.address}; expected one without a zone: torchrun does "
                "not take it. Name the machine, or use an address that is valid on the whole network."
            )
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--master-port is {self.port}; expected 0 to 65535.")
        host = f"[{self.address}]" if ":" in self.address else self.address
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{self.port}"]
        words += ["--rdzv-id", self.identity]
        if self.hosts_it is not None:
            words += ["--rdzv-conf", f"is_host={'true' if self.hosts_it else 'false'}"]
        if self.own_address is not None:
            words += ["--local-addr", self.own_address]
        return words


LOOPBACK = Meeting(address="127.0.0.1", port=0, own_address="127.0.0.1")
"""For a job on one machine: a free port, and nothing that depends on the machine's name."""


def torchrun_command(
    job: LaunchJob, meeting: Meeting | None, module: str = "torch.distributed.run"
) -> list[str]:
    """The command, for a process or ``shlex.join``; ``module`` is torchrun's, or one that calls it.

    ``meeting`` None leaves it to torchrun's own variables (``PET_NNODES``, ``PET_NODE_RANK``,
    ``PET_MASTER_ADDR`` ...), which Kubeflow sets.
    """
    words = [job.python, "-m", module]
    words += ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.processes_per_node)]
    words += ["--max-restarts", str(job.max_restarts)]
    if meeting is not None:
        words += meeting.options()
    return [*words, "-m", "mt_megatron.cli", "pretrain", *job.options]
