"""Which of a job's machines this one is, and how many processes it should run."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.hostfile import Host


def node_rank(hosts: Sequence[Host]) -> int:
    """The index of this machine in ``hosts``: the one whose address a socket can be bound to here.

    Raises ``ConfigError`` when none or several are this machine.
    """
    own = [index for index, host in enumerate(hosts) if _is_here(host.name)]
    if len(own) == 1:
        return own[0]
    names = ", ".join(hosts[index].name for index in own) if own else "none"
    raise ConfigError(
        f"of the {len(hosts)} hosts in the hostfile {names} belong to this machine ({socket.gethostname()}); "
        "expected exactly one. Set --node-rank to its place in the file, from 0."
    )


def slots_of(hosts: Sequence[Host]) -> int | None:
    """How many processes each host is to run; None when the file does not say.

    Raises ``ConfigError`` when they differ: every rank's place follows from one number.
    """
    counts = {host.slots for host in hosts}
    if len(counts) == 1:
        return counts.pop()
    said = ", ".join(f"line {host.line}: {host.slots or 'nothing'}" for host in hosts[:8])
    raise ConfigError(
        f"the hosts have different numbers of processes ({said}); expected one number for all. Give the same "
        "slots= to each, or set --gpus-per-node."
    )


def _is_here(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_binds(family, address) for family, _, _, _, address in found)


def _binds(family: socket.AddressFamily, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
