"""The one device that a process has here, however it is named."""

from __future__ import annotations

from typing import Any

import torch


def device_index(device: Any) -> int:
    if device is None:
        return 0
    index = device if isinstance(device, int) else torch.device(device).index
    index = 0 if index is None or index == -1 else index
    if index != 0:
        raise RuntimeError(
            f"MUSA error: invalid device ordinal {index} (the emulator has one device a process)"
        )
    return 0
