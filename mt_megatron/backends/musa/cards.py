"""What each Moore Threads card can do, in one table; an unknown card or figure is unknown, never guessed.

Sources: capabilities and MCCL from torch_musa 2.7.1 (README, ``get_mtgpu_arch``, ``is_bf16_supported``, the
test of ``_scaled_mm``; the S5000's capability from llama.cpp's table), device ids from the PCI ID database,
peaks from the vendor's announcements as the press reported them (S80 and S3000 in November 2022, S4000 in
December 2023, S5000 in 2026, whose peak was given without a number format). Nothing here was measured or
verified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VENDOR = 0x1ED5
"""Moore Threads in the PCI ID database."""

Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card as its driver names it."""

    name: str
    capability: Capability | None
    """``torch.musa.get_device_capability``; the compiler calls 2.2 ``mp_22``."""

    mccl: bool | None
    """Whether the collective library has a build for it; None when no source says."""

    device_ids: tuple[int, ...] = ()
    """PCI device ids."""

    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    """Dense peak by torch's dtype name, in 1e12 operations per second."""

    reported: str | None = None
    """Further figures as the press reported them, which nothing is computed from."""


CARDS: tuple[Card, ...] = (
    Card(name="MTT S2000", capability=(1, 1), mccl=None, device_ids=(0x0123,)),
    Card(
        name="MTT S80",
        capability=(2, 1),
        mccl=False,
        device_ids=(0x0200, 0x0201),
        peak_tflops={"float32": 14.4},
    ),
    Card(
        name="MTT S3000",
        capability=(2, 1),
        mccl=False,
        device_ids=(0x0222,),
        peak_tflops={"float32": 15.2},
    ),
    Card(name="MTT S90", capability=(2, 2), mccl=None),
    Card(
        name="MTT S4000",
        capability=(2, 2),
        mccl=True,
        peak_tflops={"float32": 25.0, "float16": 100.0, "bfloat16": 100.0},
    ),
    Card(
        name="MTT S5000",
        capability=(3, 1),
        mccl=None,
        reported="80 GB of memory at 1.6 TB/s, 784 GB/s between cards, about 1,000 TFLOP/s in a number "
        "format that was not said",
    ),
)


def card(name: str) -> Card | None:
    """The card that a device name means: the longest entry that ``name`` contains as whole words."""
    words = f" {' '.join(name.upper().replace('-', ' ').split())} "
    # The engineering sample of the S80 calls itself S80ES.
    words = words.replace(" S80ES ", " S80 ")
    found = [each for each in CARDS if f" {each.name.upper()} " in words]
    return max(found, key=lambda each: len(each.name), default=None)


def card_of_pci(device_id: int) -> Card | None:
    """The card with this PCI device id."""
    return next((each for each in CARDS if device_id in each.device_ids), None)


def native_bf16(capability: Capability) -> bool:
    """Whether the arithmetic units compute in bf16: from 2.2 on. Below, torch_musa may emulate it."""
    return capability >= (2, 2)


def fp8_granularities(capability: Capability) -> tuple[str, ...]:
    """Scalings that ``torch._scaled_mm`` takes on the device: from 3.1 on, no block scales."""
    return ("tensor", "row") if capability >= (3, 1) else ()


def peak_flops(name: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of the device ``name`` in torch's ``dtype`` (``bfloat16``); None when unknown."""
    found = card(name)
    peak = None if found is None else found.peak_tflops.get(dtype)
    return None if peak is None else peak * 1e12


def reported(name: str) -> str | None:
    """What the press reported of the device ``name`` beside the table's other columns; None for nothing."""
    found = card(name)
    return None if found is None else found.reported


def abilities(name: str, capability: Capability | None, mccl: bool | None) -> list[str]:
    """What a card can and cannot do in training, one plain sentence each."""
    if capability is None:
        return [f"{name} is not in this version's table: its capability decides about bf16 and FP8"]
    said = [f"compute capability {capability[0]}.{capability[1]}"]
    if mccl is False:
        said.append("MCCL is not provided for it, and so it cannot train: Megatron needs a process group")
    elif mccl is None:
        said.append("whether MCCL is provided for it is not known to this version")
    else:
        said.append("MCCL")
    said.append("bf16 in hardware" if native_bf16(capability) else "no bf16 in hardware")
    scales = fp8_granularities(capability)
    said.append(
        f"FP8 GEMM through torch._scaled_mm, scaled per {' or '.join(scales)}"
        if scales
        else "no FP8 GEMM (torch._scaled_mm needs capability 3.1)"
    )
    return said
