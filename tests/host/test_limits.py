"""Limits of a container in files as the kernel shows them: cgroup versions 1 and 2, parents, mounts."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mt_megatron.backends.cpu.backend import CpuBackend
from mt_megatron.backends.host_process import cores_per_rank
from mt_megatron.comm.errors import TransportUnavailable
from mt_megatron.comm.shared_memory import memory as channel_memory
from mt_megatron.host import limits
from mt_megatron.scope.lab.snapshot import default_limit_mib

GIB = 2**30
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes files below the test's folder, which ``{}`` in their contents names; the machine is large."""
    monkeypatch.setattr(limits, "_PROC", tmp_path / "proc")
    machine = SimpleNamespace(total=512 * GIB, available=400 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)

    def make(files: dict[str, object]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text).replace("{}", str(tmp_path)))

    return make


MOUNT_2 = "31 23 0:28 / {}/cg rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNTS_1 = (
    "30 23 0:27 / /elsewhere rw - tmpfs tmpfs rw\n"
    "32 31 0:29 /docker/ab {}/cg/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 /docker/ab {}/cg/memory rw - cgroup cgroup rw,memory\n"
)


def stat(prefix: str = "", active: int = 0, inactive: int = 0) -> str:
    return f"anon 7\n{prefix}active_file {active}\n{prefix}inactive_file {inactive}\n"


def test_version_2_and_its_parents(tree: Callable[..., None]) -> None:
    tree(
        {
            "proc/cgroup": "0::/pod/box\n",
            "proc/mountinfo": MOUNT_2,
            "cg/pod/box/memory.max": "max\n",
            "cg/pod/box/memory.current": GIB,
            "cg/pod/box/cpu.max": "max 100000\n",
            "cg/pod/memory.max": 8 * GIB,
            "cg/pod/memory.current": 6 * GIB,
            "cg/pod/memory.stat": stat(active=GIB, inactive=2 * GIB),
            "cg/pod/cpu.max": "250000 100000\n",
        }
    )
    assert limits.memory() == limits.Space(total=8 * GIB, available=5 * GIB)
    assert limits.processors() == 3


def test_version_1_where_the_container_has_its_own_group_as_the_root(tree: Callable[..., None]) -> None:
    tree(
        {
            "proc/cgroup": "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n1:name=systemd:/docker/ab\n",
            "proc/mountinfo": MOUNTS_1,
            "cg/memory/memory.limit_in_bytes": 4 * GIB,
            "cg/memory/memory.usage_in_bytes": 3 * GIB,
            "cg/memory/memory.stat": stat("total_", active=GIB),
            "cg/cpu,cpuacct/cpu.cfs_quota_us": 400_000,
            "cg/cpu,cpuacct/cpu.cfs_period_us": 100_000,
        }
    )
    assert limits.memory() == limits.Space(total=4 * GIB, available=2 * GIB)
    assert limits.processors() == 4


def test_no_limit_is_the_machine(tree: Callable[..., None]) -> None:
    tree(
        {
            "proc/cgroup": "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n",
            "proc/mountinfo": MOUNTS_1 + MOUNT_2,
            "cg/memory/memory.limit_in_bytes": 9223372036854771712,
            "cg/memory/memory.usage_in_bytes": 3 * GIB,
            "cg/cpu,cpuacct/cpu.cfs_quota_us": -1,
            "cg/cpu,cpuacct/cpu.cfs_period_us": 100_000,
        }
    )
    assert limits.memory() == limits.Space(total=512 * GIB, available=400 * GIB)
    assert limits.processors() == 64


def test_a_group_above_its_limit_has_nothing_left_and_half_a_processor_is_one(
    tree: Callable[..., None],
) -> None:
    tree(
        {
            "proc/cgroup": "0::/\n",
            "proc/mountinfo": MOUNT_2.replace("/cg ", "/c\\040g "),
            "c g/memory.max": GIB,
            "c g/memory.current": 2 * GIB,
            "c g/memory.stat": stat(),
            "c g/cpu.max": "50000 100000\n",
        }
    )
    assert limits.memory() == limits.Space(total=GIB, available=0)
    assert limits.processors() == 1


def test_without_proc_the_machine_counts(tree: Callable[..., None]) -> None:
    tree({})
    assert limits.memory().total == 512 * GIB and limits.processors() == 64


def test_shared_memory_is_the_mounts_and_no_more_than_the_memory(
    tree: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree({})
    mount = SimpleNamespace(f_frsize=4096, f_blocks=64 * 256, f_bavail=60 * 256)
    monkeypatch.setattr(os, "statvfs", lambda path: mount)
    assert limits.shared_memory() == limits.Space(total=64 << 20, available=60 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=50 << 20, available=9 << 20))
    assert limits.shared_memory() == limits.Space(total=50 << 20, available=9 << 20)


def test_whoever_asks_gets_the_containers(tree: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    tree(
        {
            "proc/cgroup": "0::/box\n",
            "proc/mountinfo": MOUNT_2,
            "cg/box/memory.max": 8 * GIB,
            "cg/box/memory.current": 6 * GIB,
            "cg/box/memory.stat": stat(),
            "cg/box/cpu.max": "800000 100000",
        }
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert default_limit_mib() == 512.0
    assert cores_per_rank(2) == 4 and CpuBackend().total_memory() == 8 * GIB
    assert CpuBackend().available()[1].startswith("8 processors")
    with pytest.raises(TransportUnavailable, match="2048 MiB are available"):
        os.close(channel_memory.create(3 * GIB))


def test_one_module_asks_for_limits() -> None:
    """Another function would see the machine where this process is in a container."""
    asking = {"virtual_memory", "cpu_count", "sched_getaffinity", "RLIMIT_NOFILE", "RLIMIT_AS"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path in sorted((ROOT / "mt_megatron").rglob("*.py"))
        if path != ROOT / "mt_megatron" / "host" / "limits.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in asking
    ]
    # Doctor shows the machine's cores beside those that are allowed.
    assert [each for each in found if not each.startswith("mt_megatron/cli/doctor/host.py")] == []
