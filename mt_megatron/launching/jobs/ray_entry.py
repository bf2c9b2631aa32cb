"""A Python program for ``ray job submit`` that holds one machine per torchrun by a placement group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.job import LaunchJob


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """What Ray alone wants to know."""

    cpus_per_node: int = 1
    """Processors that each machine's part reserves."""

    vendor: Literal["nvidia", "mthreads", "none"] = "nvidia"
    """Ray counts NVIDIA devices as ``GPU``; others are a resource of the cluster's own, ``mthreads_gpu``."""


def ray_program(job: LaunchJob, ray: RayOptions) -> str:
    """The program's source. Every value in it is a Python literal. Raises ``ConfigError``."""
    if ray.cpus_per_node < 1:
        raise ConfigError(f"--cpus-per-node is {ray.cpus_per_node}; expected at least 1.")
    bundle: dict[str, int] = {"CPU": ray.cpus_per_node}
    if ray.vendor != "none":
        bundle["GPU" if ray.vendor == "nvidia" else "mthreads_gpu"] = job.processes_per_node
    command = [job.python, "-m", "mt_megatron.cli", "launch", "--python", job.python]
    command += ["--nodes", str(job.nodes), "--gpus-per-node", str(job.processes_per_node)]
    command += ["--max-restarts", str(job.max_restarts)]
    options = ["--", *job.options]
    values = {
        "NODES": job.nodes,
        "BUNDLE": bundle,
        "COMMAND": command,
        "OPTIONS": options,
        "ENVIRONMENT": job.variables(),
    }
    constants = "\n".join(f"{name} = {value!a}" for name, value in values.items())
    return _PROGRAM.replace("# CONSTANTS\n", constants + "\n")


_PROGRAM = '''\
"""Made by mt-megatron launch --print ray. Submit it: ray job submit --working-dir . -- python FILE"""

import os
import signal
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# CONSTANTS


@ray.remote(num_cpus=0, max_retries=0)
def meeting_place():
    """An address of the first machine that the others reach, and a port that is free there."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


@ray.remote(max_retries=0)
def train(node, address, port):
    """One torchrun; returns its exit code."""
    place = ["--master-addr", address, "--master-port", str(port), "--rendezvous-id", "ray"]
    place += ["--node-rank", str(node), "--local-addr", ray.util.get_node_ip_address()]
    # Ray sets it to the task's processors, which are those of all ranks: each would start as many threads.
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen([*COMMAND, *place, *OPTIONS], env={**inherited, **ENVIRONMENT})
    try:
        return process.wait()
    finally:
        # When the job is stopped: training saves and ends by itself.
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()


def main():
    ray.init(address="auto")
    group = placement_group([BUNDLE] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(node, task, **resources):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        return task.options(scheduling_strategy=where, **resources)

    address, port = ray.get(on(0, meeting_place).remote())
    resources = {name: count for name, count in BUNDLE.items() if name not in ("CPU", "GPU")}
    needs = {"num_cpus": BUNDLE["CPU"], "num_gpus": BUNDLE.get("GPU", 0), "resources": resources}
    running = [on(node, train, **needs).remote(node, address, port) for node in range(NODES)]
    codes = ray.get(running)
    print("exit codes of the machines:", codes)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
'''
