"""Threads of a rank are on the rank's device, and no call to a backend leaves its device to a default.

The fake backend has what CUDA and MUSA have: a current device per thread, which is 0 in a new one.
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_megatron.backends import current, registry
from mt_megatron.backends.base import Backend
from mt_megatron.backends.cpu.backend import CpuBackend
from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.scan.session import Session

ROOT = Path(__file__).parents[2]

OTHER_PROCESSES = (
    "backends/loader_workers.py",  # workers of the data loader, which use no device
    "cli/",
    "convert/",
    "scan/monitor/alerts.py",  # the watcher's process
    "scan/monitor/metrics_endpoint.py",
    "scope/sidecar/follow.py",  # the sidecar's
    "scope/sidecar/keeper.py",
    "scope/sidecar/sidecar.py",
    "scope/sidecar/sinks/",
    "scope/web/",
)
"""Below ``mt_megatron``: no rank runs it, in a thread at least."""

STARTERS = {
    *("Thread", "Timer", "start_new_thread", "ThreadPoolExecutor", "ThreadPool", "ThreadingHTTPServer"),
    *("ThreadingTCPServer", "to_thread", "run_in_executor"),
}


class FourDevices(CpuBackend):
    """Notes by which thread and on which device each call comes."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, str, int]] = []
        self.asked = threading.Event()
        self._of_thread = threading.local()

    def device_count(self) -> int:
        return 4

    def current_device(self) -> int:
        return getattr(self._of_thread, "index", 0)

    def set_device(self, index: int) -> None:
        self._of_thread.index = index

    def note(self, name: str, index: int) -> None:
        self.heard.append((threading.current_thread().name, name, index))

    def telemetry(self, index: int | None = None) -> Any:
        self.note("telemetry", self.current_device() if index is None else index)
        self.asked.set()
        return super().telemetry(0)

    def synchronize(self) -> None:
        self.note("synchronize", self.current_device())


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FourDevices:
    """In force in this process, as of the rank of device 3."""
    made = FourDevices()
    monkeypatch.setattr(current, "_source", lambda: made)
    made.set_device(3)
    return made


def test_a_rank_records_its_own_devices_telemetry(backend: FourDevices, tmp_path: Path) -> None:
    traced = Session(tmp_path, rank=0, layout=RankLayout(world_size=1), backend=backend)
    traced.start()
    try:
        assert backend.asked.wait(30)
    finally:
        traced.close()
    assert {heard for heard in backend.heard if heard[1] == "telemetry"} == {
        ("scan-telemetry", "telemetry", 3)
    }


def test_a_thread_of_a_rank_begins_on_the_device_of_its_starter(backend: FourDevices) -> None:
    from mt_megatron.backends.threads import RankThread

    made = RankThread(target=backend.synchronize, name="ours")
    backend.set_device(2)  # The starter's device counts, not the maker's at the time.
    for thread in (made, threading.Thread(target=backend.synchronize, name="plain")):
        thread.start()
        thread.join()
    assert backend.heard == [("ours", "synchronize", 2), ("plain", "synchronize", 0)]


def test_a_process_that_uses_no_device_so_far_begins_no_use(
    backend: FourDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first use no child can be forked that uses the device."""
    from mt_megatron.backends.threads import RankThread

    monkeypatch.setattr(torch.cpu, "is_initialized", lambda: False)
    monkeypatch.setattr(backend, "current_device", lambda: pytest.fail("the runtime was asked"))
    thread = RankThread(target=lambda: None)
    thread.start()
    thread.join()


def started(source: str) -> list[int]:
    """Lines that start a thread, or subclass one, by other means than ``RankThread``."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call):
            found = [node.func]
        elif isinstance(node, ast.ClassDef):
            found = node.bases
        names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in found}
        if names & STARTERS:
            lines.append(node.lineno)
    return lines


def test_one_helper_starts_every_thread_of_a_rank() -> None:
    package = ROOT / "mt_megatron"
    found = [
        f"{name}:{line}"
        for path in sorted(package.rglob("*.py"))
        if not (name := path.relative_to(package).as_posix()).startswith(OTHER_PROCESSES)
        and name != "backends/threads.py"
        for line in started(path.read_text())
    ]
    assert found == [], f"{found} start threads, which a device runtime puts on device 0; use RankThread"


def test_the_lint_sees_each_way_to_start_a_thread() -> None:
    """Negative control."""
    for line in ("threading.Thread(target=f)", "Thread(target=f).start()", "threading.Timer(1, f)"):
        assert started(line) == [1], line
    assert started("class Mine(threading.Thread): ...") == [1] and started("RankThread(target=f)") == []


def defaulted(method: Callable[..., Any]) -> list[str]:
    """Parameters of ``method`` that name a device and have a default."""
    return [
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is not inspect.Parameter.empty
        and (name in ("index", "device") or "device" in name or str(parameter.annotation).startswith("int"))
    ]


def test_no_method_of_a_backend_has_a_default_device() -> None:
    kinds = [Backend, *(type(registry.get(name)) for name in registry.names())]
    found = {
        f"{kind.__name__}.{name}({parameter}=...)"
        for kind in kinds
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        for parameter in defaulted(method)
    }
    assert found == set(), f"{sorted(found)}: the default is the current device, device 0 in a new thread"


def test_a_default_device_is_found() -> None:
    """Negative control."""
    assert defaulted(FourDevices.telemetry) == ["index"] and defaulted(CpuBackend.telemetry) == []
