"""SIGKILL of either end at random points; run by ``run_ranks`` in a process that forks the two ends."""

from __future__ import annotations

import os
import random
import signal
import socket
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from mt_megatron.comm.errors import PeerLost
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport
from tests.comm.pairs import BACK, THERE, Child, connected

_SIZES = (1, 1000, 3000, 9000, 60_000)


def trials(count: int, seed: int, helper: str) -> list[dict[str, Any]]:
    """For each trial which end was killed, after how many seconds the other named it, how, what is left."""
    return [_trial(random.Random(seed + each), helper) for each in range(count)]


def _trial(draws: random.Random, helper: str) -> dict[str, Any]:
    names = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ready = [os.pipe() for _ in range(2)]
        ends = [
            Child(lambda rank=rank: _end(store, rank, ready[rank][1], draws.random(), helper))
            for rank in range(2)
        ]
        inodes = {int(os.read(read, 32)) for read, _ in ready}
        time.sleep(draws.uniform(0, 0.06))
        victim = draws.randrange(2)
        killed_at = time.monotonic()
        os.kill(ends[victim].pid, signal.SIGKILL)
        ends[victim].reap()
        found: dict[str, Any] = ends[1 - victim].result()
        for pipe in ready:
            for each in pipe:
                os.close(each)
    found["seconds"] -= killed_at
    found["victim"] = victim
    found["names the victim"] = found.pop("pid") == ends[victim].pid and found.pop("rank") == victim
    found["left"] = sorted(set(os.listdir("/dev/shm")) - names) + _holders(inodes)
    return found


def _end(store: str, rank: int, ready: int, seed: float, helper: str) -> dict[str, Any]:
    """Traffic of all sizes until the peer is lost; some of it in place, some never taken."""
    transport = connected(store, rank, [THERE, BACK], helper=helper)
    os.write(ready, f"{_inode():032d}".encode())
    try:
        _traffic(transport, rank, random.Random(seed))
    except PeerLost as error:
        at = time.monotonic()
        transport.abandon()
        return {"seconds": at, "pid": error.pid, "rank": error.rank, "seen": error.seen}
    raise AssertionError("the traffic ended")


def _traffic(transport: SharedMemoryTransport, rank: int, draws: random.Random) -> None:
    there, back = (THERE, BACK) if rank == 0 else (BACK, THERE)
    posted: deque[Any] = deque()
    while True:
        for _ in range(draws.randrange(1, 4)):
            transport.post_send(there, torch.ones(draws.choice(_SIZES)))
            posted.append(transport.post_recv(back, None, torch.float32))
        while len(posted) > 2:
            handle = posted.popleft()
            if draws.random() < 0.5:
                with handle.lease() as got:
                    assert bool(got.all())
            else:
                assert bool(handle.wait().all())


def _inode() -> int:
    """Of a ring that this process maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:mt_megatron_p2p" in line:
            return int(line.split()[4])
    raise AssertionError("no ring is mapped")


def _holders(inodes: set[int]) -> list[str]:
    """Processes that still map or hold one of these memories."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            lines = (folder / "maps").read_text().splitlines()
            held = [
                os.stat(each).st_ino for each in (folder / "fd").iterdir() if "mt_meg" in os.readlink(each)
            ]
        except OSError:
            continue
        mapped = [int(line.split()[4]) for line in lines if "memfd:mt_megatron_p2p" in line]
        found += [f"process {folder.name} has memory {each}" for each in {*mapped, *held} & inodes]
    return found


def shared_memory_mib() -> float:
    """Of the machine: what no process maps, but somebody left, counts too."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Shmem in /proc/meminfo")


def children_that_hold_on(helper: str) -> dict[str, Any]:
    """A victim whose forked child lives on, and one that gave its connection to another program: the peer
    names either within seconds; what a forked child may do with the channels."""
    found: dict[str, Any] = {}
    for name, keep in (("forked child", _forked_child), ("another program", _another_program)):
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            read, write = os.pipe()

            def victim(store: str = store, keep: Any = keep, write: int = write) -> None:
                transport = connected(store, 0, [THERE, BACK], helper=helper)
                kept = keep(transport)
                os.write(write, f"{kept[0]} {kept[1]}".encode().ljust(512))
                time.sleep(60)

            def survivor(store: str = store) -> dict[str, Any]:
                transport = connected(store, 1, [THERE, BACK], helper=helper)
                try:
                    transport.post_recv(THERE, (1,), torch.float32).wait()
                except PeerLost as error:
                    return {"at": time.monotonic(), "pid": error.pid}
                raise AssertionError("a message came")

            ends = [Child(victim), Child(survivor)]
            kept, said = os.read(read, 512).decode().strip().split(" ", 1)
            time.sleep(0.05)
            os.kill(ends[0].pid, signal.SIGKILL)
            at = time.monotonic()
            ends[0].reap()
            try:
                result = ends[1].result()
                alive = Path(f"/proc/{kept}").exists()
            finally:
                os.kill(int(kept), signal.SIGKILL)
            found[name] = {
                "seconds": result["at"] - at,
                "named": result["pid"] == ends[0].pid,
                "child lived": alive,
                "said": said,
            }
    return found


def _forked_child(transport: SharedMemoryTransport) -> tuple[int, str]:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        said = []
        for use in (
            lambda: transport.post_send(THERE, torch.ones(1)),
            lambda: transport.post_recv(BACK, (1,), torch.float32).wait(),
            transport.finish,
        ):
            try:
                use()
            except Exception as error:  # noqa: BLE001 - what is looked for.
                said.append(f"{type(error).__name__}: {error}")
        transport.close()
        mapped = "memfd:mt_megatron_p2p" in Path("/proc/self/maps").read_text()
        os.write(write, f"{mapped} {' | '.join(said)}"[:480].encode())
        time.sleep(60)
        os._exit(0)
    return pid, os.read(read, 480).decode()


def _another_program(transport: SharedMemoryTransport) -> tuple[int, str]:
    import subprocess

    connection: socket.socket = transport._peers[1]._connection
    process = subprocess.Popen(["sleep", "60"], pass_fds=[connection.fileno()])
    return process.pid, "it has the connection"
