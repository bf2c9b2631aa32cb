"""The variables of a run of one process, for a script that torchrun did not start."""

from __future__ import annotations

import socket
from collections.abc import Mapping

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
