"""Assumptions of ``plan --suggest`` about a machine: published figures of devices and rules of thumb."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from mt_megatron.errors import ConfigError

_GIB = 2**30
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**n for n, p in enumerate("kmgt", start=1)},
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgt", start=1)},
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device in nodes of several. Bandwidths are per device and direction."""

    name: str
    memory_bytes: float
    """What the device has."""

    tflops: float
    """Dense peak in the run's precision, 1e12 operations per second."""

    memory_gbps: float
    """Bandwidth of the device's memory, 1e9 bytes per second."""

    intra_node_gbps: float
    """Bandwidth between devices of one node, 1e9 bytes per second."""

    inter_node_gbps: float = 50.0
    """The same between nodes; 50 is one 400 Gbit/s adapter for each device."""

    devices_per_node: int = 8
    memory_reserve: float = 0.1
    """Share of the memory that is left to the driver, the collective library and fragmentation."""

    matrix_efficiency: float = 0.7
    """Share of the peak that large matrix products reach."""

    expert_efficiency: float = 0.5
    """Share of the peak that the smaller products of routed experts reach."""

    attention_efficiency: float = 0.6
    """The same for attention, its operations counted over the whole square."""

    bandwidth_efficiency: float = 0.8
    """Share of each bandwidth that is reached."""

    latency: float = 20e-6
    """Seconds that a collective takes beside its bytes."""

    overlap: float = 0.8
    """Share of the computation beside which communication can run that hides it."""

    @property
    def usable_bytes(self) -> float:
        """Memory for training."""
        return self.memory_bytes * (1 - self.memory_reserve)


def _device(name: str, gib: float, tflops: float, memory_gbps: float, link_gbps: float) -> Hardware:
    return Hardware(
        name=name,
        memory_bytes=gib * _GIB,
        tflops=tflops,
        memory_gbps=memory_gbps,
        intra_node_gbps=link_gbps,
    )


DEVICES: dict[str, Hardware] = {
    device.name.lower(): device
    for device in (
        _device("A100-40GB", 40, 312.0, 1555.0, 300.0),
        _device("A100-80GB", 80, 312.0, 2039.0, 300.0),
        _device("H100", 80, 989.5, 3350.0, 450.0),
        _device("H100-PCIe", 80, 756.0, 2000.0, 64.0),
        _device("H200", 141, 989.5, 4800.0, 450.0),
        _device("S4000", 48, 100.0, 768.0, 120.0),
    )
}
"""By lower-case name: memory, dense bf16 peak, memory bandwidth and half of the link's two-way bandwidth,
from the vendors' data sheets and announcements; none of it was measured here."""

_DEFAULT = DEVICES["h100"]


def parse_bytes(text: str) -> float | None:
    """Bytes of ``80GiB``, ``80GB``, ``80e9`` or ``85899345920``; None when it is none of these."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        return None
    value = float(found[1]) * _UNITS[found[2]]
    return value if math.isfinite(value) and value > 0 else None


def hardware_of(memory: str, **overrides: float | None) -> Hardware:
    """The machine that ``--device-memory`` and its siblings describe.

    ``memory`` is a size, with the other figures of an H100, or the name of a known device.
    ``overrides`` replace fields by name; None leaves one alone. Raises ``ConfigError``.
    """
    device = DEVICES.get(memory.strip().lower())
    if device is None:
        size = parse_bytes(memory)
        if size is None:
            raise ConfigError(
                f"--device-memory is {memory!r}; expected a size such as 80GiB or 80e9, or a device: "
                f"{', '.join(each.name for each in DEVICES.values())}"
            )
        device = dataclasses.replace(
            _DEFAULT, name=f"a device of {size / _GIB:.1f} GiB (H100 speeds unless given)", memory_bytes=size
        )
    given = {name: value for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        option = "--" + {"tflops": "device-tflops"}.get(name, name).replace("_", "-")
        share = name in ("memory_reserve",)
        if not (0 <= value < 1 if share else 0 < value < math.inf):
            raise ConfigError(f"{option} is {value}; expected {'0 <= share < 1' if share else 'more than 0'}")
    return dataclasses.replace(device, **given)  # type: ignore[arg-type]
