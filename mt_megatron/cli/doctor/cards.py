"""Accelerators for ``doctor``: which cards are here, by whatever can name them, and what each can do.

``look`` runs in a process of its own, because it loads driver libraries; ``describe`` judges what it saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mt_megatron.backends.musa import cards as musa_cards

MARKER = "mt-megatron doctor cards:"

_NVIDIA = 0x10DE
_PCI = Path("/sys/bus/pci/devices")
# PCI base classes: a card's display and processing functions, not its audio or its bridges.
_ACCELERATOR_CLASSES = (0x03, 0x12)


def pci_devices(root: Path = _PCI) -> list[tuple[int, int]]:
    """Vendor and device id of every accelerator of the two vendors on the PCI bus."""
    found = []
    for each in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            vendor, device, kind = (
                int((each / name).read_text(), 16) for name in ("vendor", "device", "class")
            )
        except (OSError, ValueError):
            continue
        if vendor in (_NVIDIA, musa_cards.VENDOR) and kind >> 16 in _ACCELERATOR_CLASSES:
            found.append((vendor, device))
    return found


def look() -> dict[str, Any]:
    """What the management libraries and the PCI bus say."""
    from mt_megatron.backends.telemetry import Unsupported, mtml_reader, nvml_reader

    mtml, nvml = mtml_reader.names(), nvml_reader.capabilities()
    return {
        "mtml": [] if isinstance(mtml, Unsupported) else mtml,
        "mtml_reason": mtml.reason if isinstance(mtml, Unsupported) else None,
        "nvml": [] if isinstance(nvml, Unsupported) else nvml,
        "nvml_reason": nvml.reason if isinstance(nvml, Unsupported) else None,
        "pci": pci_devices(),
    }


def describe(seen: dict[str, Any], backends: dict[str, Any]) -> list[dict[str, Any]]:
    """Every card with ``name``, ``found_by`` and ``can``, from ``look`` and the probe's backends.

    torch itself is asked first, then the management library, then the PCI bus, which names a card only
    when its id is in the table.
    """
    return [*_moore_threads(seen, backends.get("musa", {})), *_nvidia(seen, backends.get("cuda", {}))]


def _entry(name: str, found_by: str, can: list[str]) -> dict[str, Any]:
    return {"name": name, "found_by": found_by, "can": can}


def _musa(name: str, capability: tuple[int, int] | None, found_by: str) -> dict[str, Any]:
    known = musa_cards.card(name)
    capability = capability or (None if known is None else known.capability)
    can = musa_cards.abilities(name, capability, None if known is None else known.mccl)
    told = musa_cards.reported(name)
    if told is not None:
        can = [*can, f"the press reported {told}"]
    return _entry(name, found_by, can)


def _moore_threads(seen: dict[str, Any], backend: dict[str, Any]) -> list[dict[str, Any]]:
    if backend.get("devices"):
        capabilities = backend.get("capabilities") or [None] * len(backend["devices"])
        pairs = zip(backend["devices"], capabilities, strict=True)
        return [_musa(name, tuple(c) if c else None, "torch_musa") for name, c in pairs]
    if seen["mtml"]:
        return [_musa(name, None, "MTML") for name in seen["mtml"]]
    found = []
    for vendor, device in seen["pci"]:
        if vendor == musa_cards.VENDOR:
            known = musa_cards.card_of_pci(device)
            if known is not None:
                found.append(_musa(known.name, None, f"PCI id {device:04x}"))
            else:
                why = f"not named by its PCI id; MTML would name it: {seen['mtml_reason']}"
                found.append(_entry("a Moore Threads device", f"PCI id {device:04x}", [why]))
    return found


def _nvidia(seen: dict[str, Any], backend: dict[str, Any]) -> list[dict[str, Any]]:
    if backend.get("devices") and backend.get("capabilities"):
        pairs = zip(backend["devices"], backend["capabilities"], strict=True)
        return [_entry(name, "torch", _cuda_abilities(tuple(each))) for name, each in pairs]
    if seen["nvml"]:
        return [_entry(name, "NVML", _cuda_abilities(tuple(each))) for name, each in seen["nvml"]]
    why = f"no driver answers for it: {seen['nvml_reason']}"
    return [
        _entry("an NVIDIA device", f"PCI id {device:04x}", [why])
        for vendor, device in seen["pci"]
        if vendor == _NVIDIA
    ]


def _cuda_abilities(capability: tuple[int, ...]) -> list[str]:
    fp8 = "no FP8 GEMM (needs compute capability 8.9)"
    if capability >= (8, 9):
        scales = "tensor" if capability < (9, 0) else "tensor or row"
        fp8 = f"FP8 GEMM through torch._scaled_mm, scaled per {scales}"
    bf16 = "bf16 in hardware" if capability >= (8, 0) else "no bf16 in hardware"
    return [f"compute capability {capability[0]}.{capability[1]}", "NCCL", bf16, fp8]


if __name__ == "__main__":
    print(MARKER)
    print(json.dumps(look()))
    sys.exit(0)
