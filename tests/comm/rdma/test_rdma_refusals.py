"""Refusals of RDMA where it cannot be used, from folders laid out as sysfs does it."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from mt_megatron.comm.errors import TransportUnavailable
from mt_megatron.comm.rdma import ports, transport
from mt_megatron.comm.rdma.ports import Unusable, find_port, usable
from mt_megatron.comm.rdma.transport import RdmaTransport
from mt_megatron.errors import ConfigError
from tests.comm.rdma.message_traffic import SharedBootstrap

ROOT = Path(__file__).resolve().parents[3]
UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"
LOCAL = "fe80:0000:0000:0000:7c1d:4bff:fe4a:5a01"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"


class Machine:
    """A folder with the files of sysfs and of /dev that are read."""

    def __init__(self, folder: Path) -> None:
        self.sysfs = folder / "sys" / "infiniband"
        self.devices = folder / "dev"
        self.devices.mkdir()

    def add(
        self,
        name: str,
        *,
        state: str = "4: ACTIVE",
        link: str = "Ethernet",
        gids: tuple[tuple[str, str], ...] = ((LOCAL, "RoCE v2"), (IPV4, "RoCE v2")),
        number: int = 1,
        has_parent: bool = True,
    ) -> None:
        port = self.sysfs / name / "ports" / str(number)
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs" / "types").mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text(link + "\n")
        for index, (gid, kind) in enumerate((*gids, (UNUSED, ""))):
            (port / "gids" / str(index)).write_text(gid + "\n")
            if kind:
                (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
        door = f"uverbs{len(list(self.devices.iterdir()))}"
        (self.devices / door).touch()
        if has_parent:
            (self.sysfs / name / "device" / "infiniband_verbs" / door).mkdir(parents=True)
        else:
            entry = self.sysfs.parent / "infiniband_verbs" / door
            entry.mkdir(parents=True)
            (entry / "ibdev").write_text(name + "\n")

    def find(self, **environ: str) -> ports.Port:
        return find_port(environ, sysfs=self.sysfs, devices=self.devices)

    def refusal(self, **environ: str) -> str:
        with pytest.raises(Unusable) as caught:
            self.find(**environ)
        return str(caught.value)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_device(machine: Machine) -> None:
    assert f"{machine.sysfs} lists no RDMA device" in machine.refusal()


def test_a_port_that_is_down_is_said_with_its_state(machine: Machine) -> None:
    machine.add("mlx5_0", state="1: DOWN")
    assert machine.refusal() == "mlx5_0 port 1 is DOWN, not ACTIVE"


def test_permission_is_said_with_the_file(machine: Machine) -> None:
    machine.add("mlx5_0")
    (machine.devices / "uverbs0").unlink()
    assert machine.refusal() == f"mlx5_0: no permission to read and write {machine.devices}/uverbs0"


def test_a_device_without_uverbs_is_said(machine: Machine) -> None:
    machine.add("mlx5_0")
    shutil.rmtree(machine.sysfs / "mlx5_0" / "device")
    assert "the kernel module ib_uverbs is not loaded" in machine.refusal()


def test_all_gids_unused_is_said(machine: Machine) -> None:
    machine.add("rxe0", gids=(), has_parent=False)
    assert machine.refusal() == "rxe0 port 1 has no GID"


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        (((LOCAL, "RoCE v1"), (LOCAL, "RoCE v2"), (IPV4, "RoCE v1"), (IPV4, "RoCE v2")), 3),
        (((LOCAL, "RoCE v2"), (IPV6, "RoCE v2"), (IPV4, "RoCE v2")), 2),
        (((LOCAL, "RoCE v2"), (IPV6, "RoCE v2")), 1),
        (((LOCAL, "RoCE v2"), (IPV4, "RoCE v1")), 0),
        (((LOCAL, "RoCE v1"),), 0),
    ],
)
def test_the_gid_is_a_routable_one_of_roce_v2(
    machine: Machine, gids: tuple[tuple[str, str], ...], index: int
) -> None:
    machine.add("mlx5_0", gids=gids)
    port = machine.find()
    assert (port.gid_index, port.gid, port.gid_type) == (index, *gids[index])


def test_soft_roce_and_infiniband_are_found(machine: Machine) -> None:
    machine.add("rxe0", has_parent=False)
    machine.add("mlx5_7", link="InfiniBand", gids=((LOCAL, ""),))
    assert machine.find(MT_MEGATRON_IB_HCA="rxe").gid == IPV4
    assert machine.find(MT_MEGATRON_IB_HCA="mlx5").gid_type == "InfiniBand"


def test_local_ranks_take_ports_in_turn(machine: Machine) -> None:
    for name in ("mlx5_1", "mlx5_0", "mlx5_2"):
        machine.add(name, state="1: DOWN" if name == "mlx5_1" else "4: ACTIVE")
    assert [machine.find(LOCAL_RANK=str(rank)).device for rank in range(3)] == ["mlx5_0", "mlx5_2", "mlx5_0"]


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("mlx5_1", "mlx5_1"),
        ("=mlx5_1", "mlx5_1"),
        ("mlx5_10", "mlx5_10"),
        ("^mlx5_0", "mlx5_1"),
        ("other,mlx5_1:1", "mlx5_1"),
    ],
)
@pytest.mark.parametrize("variable", ["MT_MEGATRON_IB_HCA", "NCCL_IB_HCA"])
def test_devices_are_chosen_by_variable(machine: Machine, variable: str, text: str, device: str) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_10"):
        machine.add(name)
    assert machine.find(**{variable: text}).device == device


def test_an_exact_name_is_no_prefix_and_the_own_variable_goes_first(machine: Machine) -> None:
    machine.add("mlx5_10")
    assert "is excluded by NCCL_IB_HCA==mlx5_1" in machine.refusal(NCCL_IB_HCA="=mlx5_1")
    assert machine.find(NCCL_IB_HCA="nothing", MT_MEGATRON_IB_HCA="mlx5").device == "mlx5_10"


def test_the_gid_is_chosen_by_variable(machine: Machine) -> None:
    machine.add("mlx5_0")
    assert machine.find(NCCL_IB_GID_INDEX="0").gid == LOCAL
    assert machine.find(NCCL_IB_GID_INDEX="-1").gid == IPV4
    assert machine.refusal(MT_MEGATRON_IB_GID_INDEX="9") == "mlx5_0 port 1 has no GID 9"


@pytest.mark.parametrize(
    ("variable", "text"), [("MT_MEGATRON_IB_HCA", "mlx5:one"), ("NCCL_IB_GID_INDEX", "last")]
)
def test_variables_that_cannot_be_read_are_errors(machine: Machine, variable: str, text: str) -> None:
    machine.add("mlx5_0")
    with pytest.raises(ConfigError, match=f"found '{text}' in {variable}"):
        machine.find(**{variable: text})


def test_a_missing_pyverbs_is_said_before_all_else(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = usable({}, sysfs=machine.sysfs, devices=machine.devices)
    assert said is not None and said.startswith("the module pyverbs is not installed; install it (pip:")


def test_a_low_limit_of_locked_memory_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("mlx5_0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64 << 10, 64 << 10))
    monkeypatch.setattr(ports, "_may_lock_memory", lambda: False)
    said = usable({}, sysfs=machine.sysfs, devices=machine.devices)
    assert (
        said is not None and "may lock 64 KiB of memory, less than 65536 KiB; raise the limit (ulimit" in said
    )
    monkeypatch.setattr(ports, "_may_lock_memory", lambda: True)
    assert usable({}, sysfs=machine.sysfs, devices=machine.devices) is None


@pytest.mark.skipif(ports.usable() is None, reason="this machine has an RDMA device")
def test_on_this_machine_the_transport_is_refused_with_the_reason() -> None:
    reason = transport.unavailable_here()
    assert reason
    with pytest.raises(TransportUnavailable, match="transport rdma cannot be used") as caught:
        RdmaTransport(SharedBootstrap({}, 0))
    assert f"{caught.value.reason}; {caught.value.change}" == reason


def test_the_guest_test_says_why_it_is_skipped(tmp_path: Path) -> None:
    """Without packages nothing is downloaded, and the exit code is neither success nor failure."""
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "rdma" / "run.sh")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": str(tmp_path / "python"), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 77 and done.stdout.startswith("skipped: there is no ")
    assert not list(tmp_path.iterdir())
