"""Messages over NIXL between processes of one machine, where its wheel is installed, and refusals.

``pip install --no-deps nixl nixl-cu12`` installs what is needed, or unpack the two wheels and put their
folder on PYTHONPATH; without ``--no-deps`` pip would replace torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_megatron.comm.bootstrap import Place
from mt_megatron.comm.errors import PeerLost, TransportUnavailable
from mt_megatron.comm.nixl import transport as nixl_transport
from mt_megatron.comm.nixl.agent import NixlDevice
from mt_megatron.comm.nixl.transport import NixlTransport
from mt_megatron.comm.rdma.completions import FAILED, failure_of_status
from mt_megatron.comm.rdma.transport import RingSize
from mt_megatron.comm.transport import Edge
from tests.comm.pairs import Child
from tests.comm.rdma.message_traffic import FolderBootstrap, SharedBootstrap, exchange
from tests.launch import run_ranks

MISSING = nixl_transport.unavailable_here()
needs_nixl = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
FORTH, BACK = Edge(0, 1, 0), Edge(1, 0, 0)


def run(name: str, folder: str) -> Any:
    """What the function ``name`` of this file returns; run by ``run_ranks`` in a process that may fork."""
    return globals()[name](Path(folder))


def opened(rank: int, folder: Path, **options: Any) -> NixlTransport:
    settings: dict[str, Any] = {"timeout": 20.0, "crc": True, "size": RingSize(8, 1 << 16), **options}
    return NixlTransport(FolderBootstrap(folder, rank), **settings)


def traffic(folder: Path) -> list[dict[str, Any]]:
    def work(rank: int) -> dict[str, Any]:
        transport = opened(rank, folder)
        found = exchange(transport, rank, messages=300, producers=4, seed=11)
        transport.close()
        return found

    children = [Child(lambda rank=rank: work(rank)) for rank in range(2)]
    return [child.result() for child in children]


def kill(folder: Path) -> dict[str, Any]:
    """SIGKILL of a peer that has sent a little."""

    def wait() -> dict[str, Any]:
        transport = opened(0, folder)
        transport.prepare([BACK])
        transport.post_recv(BACK, (3,), torch.float32).wait()
        expected = transport.post_recv(BACK, (3,), torch.float32)
        (folder / "ready").touch()
        try:
            expected.wait()
        except PeerLost as error:
            return {"at": time.monotonic(), "said": str(error), "pid": error.pid}
        finally:
            transport.close()
        raise AssertionError("the peer was never lost")

    def send() -> None:
        transport = opened(1, folder)
        transport.prepare([BACK])
        transport.post_send(BACK, torch.ones(3))
        time.sleep(60)

    waits, sends = Child(wait), Child(send)
    while not (folder / "ready").exists():
        time.sleep(0.01)
    killed = time.monotonic()
    os.kill(sends.pid, signal.SIGKILL)
    sends.reap()
    found = waits.result()
    return {**found, "seconds": found["at"] - killed, "is its process": found["pid"] == sends.pid}


@needs_nixl
def test_random_messages_over_nixl(tmp_path: Path) -> None:
    found = run_ranks(1, "tests.comm.test_nixl:run", "traffic", str(tmp_path), timeout=60)[0]
    assert [each["received"] for each in found] == [300, 300]
    assert [each["wrong"] for each in found] == [0, 0]


@needs_nixl
def test_a_killed_peer_is_named_within_two_seconds(tmp_path: Path) -> None:
    found = run_ranks(1, "tests.comm.test_nixl:run", "kill", str(tmp_path), timeout=60)[0]
    assert found["seconds"] < 2.0 and found["is its process"]
    assert f"rank 1 (process {found['pid']} on " in found["said"]


@pytest.mark.skipif(MISSING is None, reason="nixl is installed")
def test_without_nixl_the_reason_is_said() -> None:
    assert "pip install --no-deps nixl" in str(nixl_transport.unavailable_here())
    with pytest.raises(TransportUnavailable, match="transport nixl cannot be used: nixl cannot be imported"):
        NixlTransport(SharedBootstrap({}, 0))


def test_a_module_that_is_no_nixl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "nixl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_api.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("nixl", "nixl._api"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    assert importlib.util.find_spec("nixl") is not None
    assert nixl_transport.unavailable_here() is None
    with pytest.raises(TransportUnavailable, match=re.escape("libcuda.so.1: cannot open")):
        NixlTransport(SharedBootstrap({}, 0))


def test_an_error_of_the_library_is_in_that_of_the_link() -> None:
    class Agent:
        def get_new_notifs(self, backends: list[str]) -> Any:
            raise RuntimeError("UCX_PROGRESS failed")

    device = NixlDevice(Agent())
    device._thread.join(30)
    place = Place(1, "there", 7, "", "", 0)
    error = failure_of_status(FAILED, device.where, place, port_is_active=device.port_is_active())
    assert "over NIXL (UCX; RuntimeError: UCX_PROGRESS failed) to rank 1" in str(error)
    device.close()
