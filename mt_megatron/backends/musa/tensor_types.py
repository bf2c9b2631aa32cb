"""``torch.cuda.FloatTensor`` and its kin for a device that has no such classes."""

from __future__ import annotations

from typing import Any

import torch

_DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}


def tensor_types(device_type: str) -> dict[str, type]:
    """``FloatTensor`` ... for ``device_type``: calling one makes a tensor, ``isinstance`` asks for its
    dtype and device, as torch's legacy tensor classes do."""
    return {f"{kind}Tensor": _tensor_type(kind, dtype, device_type) for kind, dtype in _DTYPES.items()}


def _tensor_type(kind: str, dtype: torch.dtype, device_type: str) -> type:
    class Legacy(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return (
                isinstance(instance, torch.Tensor)
                and instance.dtype == dtype
                and instance.device.type == device_type
            )

        def __call__(cls, *args: Any) -> torch.Tensor:
            if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
                return torch.as_tensor(args[0]).to(device_type, dtype)
            sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
            return torch.empty(tuple(sizes) or (0,), dtype=dtype, device=device_type)

    return Legacy(f"{kind}Tensor", (), {"__module__": f"torch.{device_type}", "dtype": dtype})
