"""Devices and nodes of processes that torchrun did not start."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.backends.distributed.namespace import local_device, node_count
from mt_megatron.errors import BackendError

EIGHT: Any = SimpleNamespace(name="cuda", device_count=lambda: 8)
ONE: Any = SimpleNamespace(name="cpu", device_count=lambda: 1)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") or name.startswith(("LOCAL_", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)


def given(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for each in text.split():
        monkeypatch.setenv(*each.split("="))


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", 1),
        ("WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 MASTER_ADDR=10.0.0.1", 1),
        ("WORLD_SIZE=12 LOCAL_WORLD_SIZE=8 MASTER_ADDR=10.0.0.1", 2),
        ("WORLD_SIZE=2 MASTER_ADDR=127.0.0.1", 1),
        ("WORLD_SIZE=2 MASTER_ADDR=localhost", 1),
        ("WORLD_SIZE=2 MASTER_ADDR=10.0.0.1", 2),
    ],
)
def test_nodes_of_a_job(text: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several where that is not sure: collectives that are bound to loopback reach no other node."""
    given(monkeypatch, text)
    assert node_count() == nodes


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("", 0),
        ("RANK=11 WORLD_SIZE=16 LOCAL_RANK=3 SLURM_LOCALID=4", 3),
        ("RANK=11 WORLD_SIZE=16 SLURM_LOCALID=3 MASTER_ADDR=10.0.0.1", 3),
        ("RANK=11 WORLD_SIZE=16 OMPI_COMM_WORLD_LOCAL_RANK=3 MASTER_ADDR=10.0.0.1", 3),
        ("RANK=5 WORLD_SIZE=8 MASTER_ADDR=127.0.0.1", 5),
        ("RANK=5 WORLD_SIZE=8 MASTER_ADDR=127.0.0.1 SLURM_LOCALID=0", 5),
        ("RANK=11 WORLD_SIZE=16 SLURM_LOCALID=9 MASTER_ADDR=10.0.0.1", 1),
        ("SLURM_LOCALID=3", 0),
    ],
)
def test_device_of_a_process(text: str, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, text)
    assert local_device(EIGHT) == device
    if " LOCAL_RANK" not in text:
        assert local_device(ONE) == 0


def test_processes_of_a_node_do_not_all_take_device_0(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "RANK=11 WORLD_SIZE=16 MASTER_ADDR=10.0.0.1")
    with pytest.raises(BackendError, match="LOCAL_RANK"):
        local_device(EIGHT)
