"""Telemetry: a value or a reason for every field, through stand-ins of the two driver bindings."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from mt_megatron.backends import registry, telemetry
from mt_megatron.backends.telemetry import Reading, Unsupported, mtml_reader, nvml_reader
from mt_megatron.backends.telemetry.management_library import ManagementLibrary
from mt_megatron.backends.telemetry.visible_devices import physical_index

ROOT = Path(__file__).parent.parent.parent
STAND_INS = Path(__file__).parent / "stand_ins"
VALUES = [field.name for field in fields(Reading) if field.name != "source"]


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch, reader: ModuleType) -> ModuleType:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec((STAND_INS / f"{name}.py").read_text(), module.__dict__)
    old = reader._library
    names = {key: getattr(old, f"_{key}") for key in ("module", "package", "start", "stop", "uninitialized")}
    monkeypatch.setattr(reader, "_library", ManagementLibrary(**names))
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MUSA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return module


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield stand_in("pynvml", monkeypatch, nvml_reader)


@pytest.fixture
def mtml(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield stand_in("pymtml", monkeypatch, mtml_reader)


def reasons(reading: Reading) -> dict[str, str]:
    found = {name: getattr(reading, name) for name in VALUES}
    return {name: value.reason for name, value in found.items() if isinstance(value, Unsupported)}


def test_nvml_has_every_field_in_its_unit(nvml: ModuleType) -> None:
    reading = telemetry.nvml(0)
    assert reading == Reading(
        source="nvml",
        device="NVIDIA H100 80GB HBM3",
        utilization=93,
        memory_utilization=40,
        memory_used=7 * 2**30,
        memory_total=80 * 2**30,
        temperature=61,
        power=350.0,
        power_limit=700.0,
        energy=pytest.approx(123.456),
        clock=1980,
        memory_clock=2619,
        throttle_reasons=("software power cap", "hardware thermal slowdown"),
        link_sent=138 * 1024,
        link_received=139 * 1024,
    )
    assert nvml.state["calls"] == ["start"], "one start serves all fields"


def test_a_measured_zero_is_a_value(nvml: ModuleType) -> None:
    nvml.state["reasons"] = 0x1
    reading = telemetry.nvml(1)
    assert reading.utilization == 0 and not isinstance(reading.utilization, Unsupported)
    assert reading.throttle_reasons == ()
    assert reading.plain()["utilization"] == 0 and reading.plain()["throttle_reasons"] == []


def test_mtml_has_its_fields_and_says_which_it_lacks(mtml: ModuleType) -> None:
    reading = telemetry.mtml(0)
    assert (reading.source, reading.device, reading.utilization) == ("mtml", "MTT S4000", 12)
    assert (reading.memory_used, reading.memory_total) == (2**30, 48 * 2**30)
    assert (reading.temperature, reading.power, reading.clock) == (55, 187.5, 1750)
    assert set(reasons(reading)) == {
        "power_limit",
        "energy",
        "throttle_reasons",
        "link_sent",
        "link_received",
    }
    assert mtml.state["open"] == 0, "a handle was not given back"


@pytest.mark.parametrize(
    ("question", "field"),
    [("power", "power"), ("memory", "memory_used"), ("energy", "energy"), ("reasons", "throttle_reasons")],
)
def test_an_unsupported_field_is_no_zero_and_spares_the_others(
    nvml: ModuleType, question: str, field: str
) -> None:
    nvml.state["errors"][question] = nvml.NVML_ERROR_NOT_SUPPORTED
    reading = telemetry.nvml(0)
    assert getattr(reading, field) == Unsupported("Not Supported")
    assert not getattr(reading, field) and getattr(reading, field) != 0
    assert reading.temperature == 61
    assert reading.plain()[field] == {"unsupported": "Not Supported"}


def test_the_drivers_own_mark_for_no_value_is_no_value(nvml: ModuleType) -> None:
    nvml.state.update(power=2**32 - 1, used=2**64 - 1)
    assert set(reasons(telemetry.nvml(0))) == {"power", "memory_used"}


def test_a_field_answered_with_an_error_of_its_own(nvml: ModuleType) -> None:
    nvml.state["link_result"] = nvml.NVML_ERROR_NOT_SUPPORTED
    assert set(reasons(telemetry.nvml(0))) == {"link_sent", "link_received"}


def test_an_older_binding_lacks_a_function(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nvml, "nvmlDeviceGetTotalEnergyConsumption")
    assert "nvmlDeviceGetTotalEnergyConsumption" in reasons(telemetry.nvml(0))["energy"]


def test_a_lost_device_has_no_field(nvml: ModuleType, mtml: ModuleType) -> None:
    nvml.state["errors"]["handle"] = nvml.NVML_ERROR_GPU_IS_LOST
    mtml.state["errors"]["device"] = mtml.MTML_ERROR_GPU_IS_LOST
    assert reasons(telemetry.nvml(0)) == dict.fromkeys(VALUES, "GPU is lost")
    assert reasons(telemetry.mtml(0)) == dict.fromkeys(VALUES, "Gpu Is Lost")


def test_a_device_lost_between_two_fields(mtml: ModuleType) -> None:
    mtml.state["errors"].update(utilization=669, temperature=669, clock=669)
    reading = telemetry.mtml(1)
    assert reading.utilization == Unsupported("Gpu Is Lost") and reading.memory_total == 16 * 2**30
    assert mtml.state["open"] == 0


def test_a_driver_that_is_not_loaded_and_later_is(nvml: ModuleType) -> None:
    nvml.state["start_error"] = nvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert set(reasons(telemetry.nvml(0)).values()) == {
        "the driver library cannot be used: Driver Not Loaded"
    }
    nvml.state["start_error"] = None
    assert telemetry.nvml(0).temperature == 61


def test_mtml_without_its_library_raises_oserror_inside_only(mtml: ModuleType) -> None:
    mtml.state["no_library"] = True
    (reason,) = set(reasons(telemetry.mtml(0)).values())
    assert "Failed to load MTML library" in reason and "\n" not in reason


def test_a_library_that_somebody_shut_down_is_started_again(nvml: ModuleType) -> None:
    telemetry.nvml(0)
    nvml.nvmlShutdown()
    assert telemetry.nvml(0).temperature == 61
    assert nvml.state["calls"] == ["start", "stop", "start"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_stops_the_parents_session_and_starts_its_own(nvml: ModuleType) -> None:
    telemetry.nvml(0)
    child = os.fork()
    if child == 0:
        try:
            good = telemetry.nvml(1).temperature == 61 and nvml.state["calls"] == ["start", "stop", "start"]
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert telemetry.nvml(0).temperature == 61 and nvml.state["calls"] == ["start"]


UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("value", "index", "expected"),
    [
        (None, 2, 2),
        ("2,0", 0, 2),
        ("2, 0", 1, 0),
        ("GPU-bb33,GPU-aa11", 1, 0),
        ("gpu-bb", 0, 2),
        ("1,-1,2", 0, 1),
    ],
)
def test_the_variable_is_the_one_truth(value: str | None, index: int, expected: int) -> None:
    assert physical_index(index, "CUDA_VISIBLE_DEVICES", value, UUIDS) == expected


@pytest.mark.parametrize(
    ("value", "index", "reason"),
    [
        (None, 3, "is not set and the driver has 3"),
        ("", 0, "is '' and the driver has 3"),
        ("2,0", 2, "is '2,0'"),
        ("1,-1,2", 1, "is '1,-1,2'"),
        ("0,7,1", 1, "is '0,7,1'"),
        ("GPU-a", 0, "beginning of 2 UUIDs"),
        ("MIG-aa", 0, "MIG"),
    ],
)
def test_an_index_that_is_no_device_has_a_reason(value: str | None, index: int, reason: str) -> None:
    found = physical_index(index, "CUDA_VISIBLE_DEVICES", value, UUIDS)
    assert isinstance(found, Unsupported) and reason in found.reason


def test_each_vendor_has_its_own_variable(
    nvml: ModuleType, mtml: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert telemetry.nvml(0).utilization == 0 and telemetry.mtml(0).device == "MTT S4000"
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "9a1b")
    assert telemetry.mtml(0).device == "MTT S80"


def test_unlike_gpus_are_not_guessed_at(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.state["names"] = ["NVIDIA T4", "NVIDIA H100 80GB HBM3"]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in reasons(telemetry.nvml(0))["utilization"]
    uuid = nvml.nvmlDeviceGetUUID(1).removeprefix("GPU-")
    assert telemetry.nvml(0, uuid=uuid).device == "NVIDIA H100 80GB HBM3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{uuid}")
    assert telemetry.nvml(0).device == "NVIDIA H100 80GB HBM3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert telemetry.nvml(0).device == "NVIDIA T4"


def test_the_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    first = telemetry.host()
    deadline = sum(psutil.cpu_times()) + 0.05
    while sum(psutil.cpu_times()) < deadline:
        pass
    second = telemetry.host()
    assert isinstance(second.utilization, float) and 0 < second.utilization <= 100
    assert isinstance(second.memory_used, int) and isinstance(second.memory_total, int)
    assert 0 < second.memory_used < second.memory_total == psutil.virtual_memory().total
    assert isinstance(first.power, Unsupported)
    assert math.isnan(telemetry.number(first.power)) and telemetry.number(0) == 0.0
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    assert {"temperature", "clock"} <= set(reasons(telemetry.host()))


def test_the_cpu_backend_reads_the_host() -> None:
    reading = registry.get("cpu").telemetry(0)
    assert reading.source == "host" and reading.memory_total == psutil.virtual_memory().total


def test_importing_everything_needs_no_driver_library(tmp_path: Path) -> None:
    """With bindings that cannot even be imported. torch imports pynvml itself and bears only its absence."""
    for name, error in (("pynvml", "ModuleNotFoundError('pynvml')"), ("pymtml", "OSError('libmtml.so')")):
        (tmp_path / f"{name}.py").write_text(f"raise {error}\n")
    code = (
        "import sys, mt_megatron\n"
        "from mt_megatron.backends import telemetry, registry\n"
        "registry.names(); registry.get('cpu'); registry.get('cuda')\n"
        "assert 'pymtml' not in sys.modules\n"
        "print(telemetry.nvml(0).power.reason); print(telemetry.mtml(0).power.reason)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "nvidia-ml-py is not installed (pip install nvidia-ml-py)",
        "importing pymtml failed: libmtml.so",
    ]


@pytest.mark.parametrize(("name", "reader"), [("pynvml", nvml_reader), ("pymtml", mtml_reader)])
def test_the_real_bindings_have_every_name_that_is_used(name: str, reader: ModuleType) -> None:
    binding = pytest.importorskip(name)
    source = Path(str(reader.__file__)).read_text()
    prefix = "nvml" if name == "pynvml" else "mtml"
    used = set(re.findall(rf"\b(?:{prefix}|{prefix.upper()})_?[A-Z]\w+", source))
    assert len(used) >= 14
    # One is a field of a structure, one the beginning of two names.
    others = {"nvmlReturn", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_"}
    assert {each for each in used - others if not hasattr(binding, each)} == set()
