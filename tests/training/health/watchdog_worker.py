"""A process whose main thread is a small loop of collectives under the watchdog; it can be made to stick.

python -m tests.training.health.watchdog_worker LIMIT FAULT RANK STEP
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from mt_megatron.training.health.watchdog import watched


def _stick(fault: str) -> None:
    if fault == "sleep":
        time.sleep(600)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "error":
        raise OSError("the disk is on fire")
    elif fault == "other":
        dist.broadcast(torch.zeros(7), src=dist.get_rank())


def main() -> None:
    """Forty steps of an all-reduce; the one of ``RANK`` before ``STEP`` is where the fault is."""
    limit, fault, who, when = float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    rank, tensor = dist.get_rank(), torch.ones(4, 3)
    with watched(limit, rank=rank, world_size=dist.get_world_size()) as watchdog:
        for step in range(1, 41):
            watchdog.progress(f"step {step}")
            if rank == who and step == when:
                _stick(fault)
            dist.all_reduce(tensor)
            watchdog.unlimited(f"after step {step}")
            time.sleep(0.02)
    dist.barrier()
    print(f"rank {rank} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
