"""A small real training run of four Gloo ranks, each on a host of its own, traced and watched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scan_live_limits import Limits
from scan_live_network import Hosts

ROOT = Path(__file__).resolve().parents[2]
_VOCABULARY = 512
_MODEL = f"""
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --num-query-groups 2
    --vocab-size {_VOCABULARY} --seq-length 64 --position-embedding-type rope
    --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --lr 1e-4 --tokenizer-type NullTokenizer
    --backend cpu --eval-iters 0 --log-interval 1 --num-workers 0 --micro-batch-size 1 --train-iters 100000
    --watchdog-seconds 0 --scan base --scope off --no-mmap-bin-files
"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Two ranks that exchange something, and are alone in doing so."""

    ranks: tuple[int, int]
    delay: float = 0.012
    """Seconds by which it delays each packet when slow: less where a step has hundreds of exchanges."""

    megabits: float = 4.0
    """Per second, when it is a narrow cable and a step takes a second."""


def _tensor_parallel(*ranks: int) -> Link:
    return Link(ranks=(ranks[0], ranks[1]), delay=0.001, megabits=10.0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How four ranks are spread."""

    name: str
    options: str
    links: tuple[Link, ...]
    reads: tuple[int, ...]
    """Ranks that read samples nobody else reads."""

    saves: bool = False

    competitors: tuple[int, float] = (2, 0.5)
    """Busy processes beside a rank, and to what their and its part of the processors shrinks: not at all
    where hundreds of exchanges a step each have to wait for them."""


LAYOUTS = {
    one.name: one
    for one in (
        Layout(
            name="pp4",
            options="--pipeline-model-parallel-size 4 --global-batch-size 32",
            links=(Link(ranks=(0, 1)), Link(ranks=(1, 2)), Link(ranks=(2, 3))),
            reads=(),
        ),
        Layout(
            name="pp4-zero-bubble",
            options="--pipeline-model-parallel-size 4 --global-batch-size 32 --pipeline-schedule zb_h1",
            links=(Link(ranks=(0, 1)), Link(ranks=(1, 2)), Link(ranks=(2, 3))),
            reads=(),
        ),
        Layout(
            name="pp4-breadth-first",
            options="--pipeline-model-parallel-size 4 --global-batch-size 32 --num-layers 8 "
            "--virtual-pipeline-model-parallel-size 2 --pipeline-schedule breadth_first",
            links=(Link(ranks=(0, 1)), Link(ranks=(1, 2)), Link(ranks=(2, 3))),
            reads=(),
        ),
        Layout(
            name="dp2-pp2",
            options="--pipeline-model-parallel-size 2 --global-batch-size 40",
            links=(Link(ranks=(0, 2), megabits=1.2), Link(ranks=(1, 3), megabits=1.2)),
            reads=(),
        ),
        Layout(
            name="dp2-tp2",
            options="--tensor-model-parallel-size 2 --global-batch-size 8 "
            "--allow-tensor-parallel-across-nodes",
            links=(_tensor_parallel(0, 1), _tensor_parallel(2, 3)),
            reads=(),
            competitors=(3, 1.0),
        ),
        Layout(
            name="tp2-pp2",
            options="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--allow-tensor-parallel-across-nodes --global-batch-size 8",
            links=(
                _tensor_parallel(0, 1),
                _tensor_parallel(2, 3),
                Link(ranks=(0, 2)),
                Link(ranks=(1, 3)),
            ),
            reads=(),
            competitors=(3, 1.0),
        ),
        Layout(name="dp4", options="--global-batch-size 48", links=(), reads=(0, 1, 2, 3)),
        Layout(
            name="pp4-saving",
            options="--pipeline-model-parallel-size 4 --global-batch-size 16 "
            "--save-interval 4 --save-keep-last 1",
            links=(),
            reads=(),
            saves=True,
        ),
    )
}


def write_data(prefix: Path, megabytes: int) -> None:
    """Random tokens, a few thousand documents."""
    sys.path.insert(0, str(ROOT))
    from mt_megatron.data.prepare.indexed_files import IndexedWriter

    writer, random = IndexedWriter(prefix, _VOCABULARY), np.random.default_rng(1)
    for _ in range(megabytes * 2):
        writer.add(random.integers(0, _VOCABULARY - 1, size=1 << 18, dtype=np.uint16))
    writer.finish()


@dataclass(kw_only=True)
class Job:
    """The run while it lasts."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def scan(self) -> Path:
        return self.folder / "scan"

    def step(self) -> int:
        """The last step that was reported."""
        return int(self._last().get("iteration", 0))

    def _last(self) -> dict[str, Any]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return {}
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                record: dict[str, Any] = json.loads(line)
                if "iteration" in record and "loss" in record:
                    return record
        return {}

    def findings(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Findings written after ``offset``, and the new offset."""
        path = self.scan / "findings.jsonl"
        if not path.exists():
            return [], offset
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], offset + len(whole)

    def check(self) -> None:
        """Raises ``RuntimeError`` when a rank has ended."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                tail = (self.folder / f"output.{rank}").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"rank {rank} ended with {process.returncode}:\n{tail}")

    def watcher(self) -> list[int]:
        """The process that watches; rank 0 started it, so it began within rank 0's limits."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            self.check()
            children = psutil.Process(self.processes[0].pid).children(recursive=True)
            found = [each.pid for each in children if "mt_megatron.scan.monitor.watch" in each.cmdline()]
            if found:
                return found
            time.sleep(0.2)
        raise RuntimeError("nobody watches the run")

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]


@contextlib.contextmanager
def job(layout: Layout, folder: Path, data: Path, hosts: Hosts, limits: Limits) -> Iterator[Job]:
    """A run that trains until the block ends; its processes are gone then."""
    folder.mkdir(parents=True)
    running = Job(folder=folder)
    options = [*_MODEL.split(), *layout.options.split(), "--data-path", str(data)]
    options += ["--save", str(folder / "run"), "--metrics-path", str(folder / "metrics.jsonl")]
    options += ["--data-cache-path", str(folder.parent / "cache"), "--split", "100,0,0"]
    try:
        for rank in range(hosts.count):
            with open(folder / f"output.{rank}", "wb") as output:
                running.processes.append(_rank(rank, options, hosts, limits, output))
        yield running
    finally:
        for process in running.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in running.processes:
            process.wait()
        time.sleep(1.0)  # the watcher sees that its parent is gone


def _rank(
    rank: int, options: list[str], hosts: Hosts, limits: Limits, output: Any
) -> subprocess.Popen[bytes]:
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts.count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": hosts.address(0),
        "MASTER_PORT": "29511",
        "GLOO_SOCKET_IFNAME": hosts.interface(rank),
        "TORCH_FR_BUFFER_SIZE": "200",
    }
    command = [sys.executable, "-m", "mt_megatron.cli", "pretrain", *options]
    # A host name of its own, so that a report can tell the hosts apart.
    named = ["unshare", "--uts", "sh", "-c", f'hostname live{rank}; exec "$@"', "sh", *command]
    return subprocess.Popen(
        # Not "ip netns exec", which would hide /sys and with it the control groups.
        ["nsenter", f"--net=/run/netns/{hosts.namespace(rank)}", *named],
        env={**os.environ, **variables},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: limits.enter(rank),
    )
