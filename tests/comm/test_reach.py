"""Reasons where shared memory does not reach or cannot be had; the search for the helper."""

from __future__ import annotations

import dataclasses
import errno
import importlib.machinery
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

from mt_megatron.comm.bootstrap import Place, own_place
from mt_megatron.comm.errors import TransportUnavailable
from mt_megatron.comm.shared_memory import memory, native
from mt_megatron.comm.shared_memory.peers import out_of_reach
from mt_megatron.comm.shared_memory.ring import RingSize
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport, unavailable_here
from mt_megatron.errors import ConfigError
from mt_megatron.host import limits


class NoBootstrap:
    """For transports that are refused before they ask."""

    rank = 0

    def publish(self, key: str, value: bytes) -> None:
        raise AssertionError("published")

    def fetch(self, key: str, timeout: float) -> bytes:
        raise AssertionError("fetched")


def test_two_ranks_of_this_machine_reach_each_other() -> None:
    own = own_place(0)
    assert Place.decode(own.encode()) == own and own.pid == os.getpid() and own.boot and own.network
    assert out_of_reach(own, dataclasses.replace(own, rank=1, pid=1)) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"boot": "other", "host": "far"}, "on far, another machine"),
        ({"network": "net:[1]"}, "two containers (network namespaces)"),
        ({"user": 12345}, "rank 1 as user 12345"),
    ],
)
def test_others_are_out_of_reach(change: dict[str, object], says: str) -> None:
    own = own_place(0)
    why = out_of_reach(own, dataclasses.replace(own, rank=1, **change))  # type: ignore[arg-type]
    assert why is not None and says in why


def test_a_machine_with_weak_order_needs_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(native, "load", lambda: "it was not built")
    with pytest.raises(TransportUnavailable, match="aarch64 orders memory too weakly") as error:
        SharedMemoryTransport(NoBootstrap())
    assert error.value.change and "--p2p-transport" in error.value.change
    assert "aarch64" in str(unavailable_here())
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert native.describe()["uses"] == "python" and unavailable_here() is None
    with pytest.raises(TransportUnavailable, match="the C helper is missing: it was not built"):
        SharedMemoryTransport(NoBootstrap(), helper="native")


def test_a_kernel_that_refuses_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*unused: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with pytest.raises(TransportUnavailable, match="MiB are available"):
        memory.create(1 << 60)

    def full(*unused: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(TransportUnavailable, match="No space left on device"):
            memory.create(4096)
    monkeypatch.setattr(os, "memfd_create", refuses)
    assert "refuses memfd_create (Operation not permitted)" in str(unavailable_here())
    monkeypatch.delattr(os, "memfd_create")
    assert "has no memfd_create" in str(unavailable_here())


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    monkeypatch.setattr(limits, "memory", lambda: limits.Space(total=30 * mib, available=7 * mib))
    with pytest.raises(
        TransportUnavailable, match=r"8 MiB for a channel cannot be had \(7 MiB are available"
    ):
        memory.create(8 << 20)
    os.close(memory.create(4 << 20))


def test_unsealed_memory_of_a_peer_is_refused(tmp_path: Path) -> None:
    good = memory.create(8192)
    memory.check(good, 8192)
    with pytest.raises(TransportUnavailable, match="8192 bytes"):
        memory.check(good, 4096)
    bad = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(bad, 8192)
    with pytest.raises(TransportUnavailable, match="seals 0x0"):
        memory.check(bad, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(good, 4096)
    os.close(good)
    os.close(bad)


@pytest.mark.parametrize("size", [RingSize(4096, 1), RingSize(5000, 4), RingSize(0, 4)])
def test_sizes_that_no_ring_has(size: RingSize) -> None:
    with pytest.raises(ConfigError, match="expected at least 2 slots"):
        SharedMemoryTransport(NoBootstrap(), size=size)


def test_a_device_needs_its_backend() -> None:
    with pytest.raises(ConfigError, match="without backend="):
        SharedMemoryTransport(NoBootstrap(), device=torch.device("meta"))
    with pytest.raises(ConfigError, match="helper='c'"):
        SharedMemoryTransport(NoBootstrap(), helper="c")


def test_the_helper_is_built_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "ring.c"
    source.write_text(native.SOURCE.read_text())
    monkeypatch.setattr(native, "SOURCE", source)
    load = native.load.__wrapped__
    missing = load()
    assert isinstance(missing, str) and "mt_megatron.comm.shared_memory.native" in missing
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / f"{native.STEM}{suffix}").write_bytes(b"no library")
    assert "cannot be loaded" in load()
    try:
        made = native.build()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert made.parent == tmp_path and not isinstance(load(), str)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".build")] == []
    made.unlink()
    source.write_text("#error broken\n")
    with pytest.raises(RuntimeError, match="broken"):
        native.build()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C compiler was found"):
        native.build()
    assert Path(sys.executable).name in native.build_command()


def test_the_layout_of_both_implementations_is_one() -> None:
    text = native.SOURCE.read_text()
    from mt_megatron.comm.message import HEADER_BYTES
    from mt_megatron.comm.shared_memory import protocol

    for name in ("HEAD", "CONSUMER_WAITS", "TAIL", "PRODUCER_WAITS", "HEADERS"):
        assert f"{name} = {getattr(protocol, name)}" in text
    assert f"HEADER_BYTES = {HEADER_BYTES}" in text
    assert f"DESCRIPTION_BYTES = {HEADER_BYTES - 16}" in text
