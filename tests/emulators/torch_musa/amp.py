"""``torch.musa.amp``."""

from __future__ import annotations

import types
from typing import Any

import torch


class autocast(torch.autocast):
    """``torch.autocast`` of this device."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
    ) -> None:
        super().__init__("musa", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` of this device."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            "musa",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )


def custom_fwd(fwd: Any = None, *, cast_inputs: Any = None) -> Any:
    return torch.amp.custom_fwd(fwd, device_type="musa", cast_inputs=cast_inputs)


def custom_bwd(bwd: Any) -> Any:
    return torch.amp.custom_bwd(bwd, device_type="musa")


def amp_definitely_not_available() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


module = types.SimpleNamespace(
    autocast=autocast,
    GradScaler=GradScaler,
    custom_fwd=custom_fwd,
    custom_bwd=custom_bwd,
    amp_definitely_not_available=amp_definitely_not_available,
    get_amp_supported_dtype=get_amp_supported_dtype,
)
