"""``doctor`` on a machine with cards: torch is asked first, then the driver's library, then the PCI bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mt_megatron.cli.doctor import cards as doctor_cards


def seen(**given: Any) -> dict[str, Any]:
    nothing = {
        "mtml": [],
        "nvml": [],
        "pci": [],
        "mtml_reason": "no libmtml",
        "nvml_reason": "no libnvidia-ml",
    }
    return {**nothing, **given}


def test_no_card_is_no_entry() -> None:
    assert doctor_cards.describe(seen(), {"cpu": {"devices": ["a processor"]}}) == []


def test_torch_musa_is_believed_before_the_others() -> None:
    backends = {"musa": {"devices": ["MTT S4000", "MTT X9"], "capabilities": [[2, 2], [3, 1]]}}
    known, unknown = doctor_cards.describe(seen(mtml=["MTT S80"], pci=[(0x1ED5, 0x0222)]), backends)
    assert known["found_by"] == unknown["found_by"] == "torch_musa"
    assert "compute capability 2.2" in known["can"] and "MCCL" in known["can"]
    assert any("no FP8 GEMM" in each for each in known["can"])
    assert any("FP8 GEMM through torch._scaled_mm" in each for each in unknown["can"])
    assert any("not known" in each for each in unknown["can"])


def test_mtml_names_a_card_without_torch_musa() -> None:
    (card,) = doctor_cards.describe(seen(mtml=["MTT S80"], pci=[(0x1ED5, 0x0201)]), {})
    assert card["found_by"] == "MTML"
    assert any("MCCL is not provided" in each for each in card["can"])


def test_the_pci_bus_names_what_nobody_else_does() -> None:
    devices = [(0x1ED5, 0x0222), (0x1ED5, 0x7777), (0x10DE, 0x2330)]
    known, unknown, nvidia = doctor_cards.describe(seen(pci=devices), {})
    assert (known["name"], known["found_by"]) == ("MTT S3000", "PCI id 0222")
    assert unknown["name"] == "a Moore Threads device" and "no libmtml" in unknown["can"][0]
    assert nvidia["name"] == "an NVIDIA device" and "no libnvidia-ml" in nvidia["can"][0]


def test_nvidia_by_torch_or_nvml() -> None:
    backends = {"cuda": {"devices": ["NVIDIA H100"], "capabilities": [[9, 0]]}}
    (card,) = doctor_cards.describe(seen(), backends)
    assert card["found_by"] == "torch" and "scaled per tensor or row" in card["can"][-1]
    ada, ampere, turing = doctor_cards.describe(
        seen(nvml=[["L4", [8, 9]], ["A100", [8, 0]], ["T4", [7, 5]]]), {}
    )
    assert ada["can"][-1].endswith("scaled per tensor") and "no FP8" in ampere["can"][-1]
    assert "no bf16 in hardware" in turing["can"] and "bf16 in hardware" in ampere["can"]


def test_only_accelerators_of_the_two_vendors_are_taken_from_the_bus(tmp_path: Path) -> None:
    devices = {
        "0000:01:00.0": ("0x1ed5", "0x0201", "0x030000"),
        "0000:01:00.1": ("0x1ed5", "0x02ff", "0x040300"),
        "0000:02:00.0": ("0x10de", "0x2330", "0x030200"),
        "0000:03:00.0": ("0x8086", "0x1533", "0x020000"),
        "0000:04:00.0": ("0x1ed5", "nonsense", "0x030000"),
    }
    for name, values in devices.items():
        (tmp_path / name).mkdir()
        for file, value in zip(("vendor", "device", "class"), values, strict=True):
            (tmp_path / name / file).write_text(value + "\n")
    assert doctor_cards.pci_devices(tmp_path) == [(0x1ED5, 0x0201), (0x10DE, 0x2330)]
    assert doctor_cards.pci_devices(tmp_path / "absent") == []
