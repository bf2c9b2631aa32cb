"""Choice of what computes quantised products: the reference, ``torch._scaled_mm`` or DeepGEMM."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Literal, Protocol

from mt_megatron.errors import ConfigError
from mt_megatron.fp8.recipe import native_recipes, require_possible

Kernels = Literal["reference", "scaled_mm", "deep_gemm"]

CHOICES = ("auto", "reference", "scaled_mm", "deep_gemm")
"""Values of ``fp8_backend``."""

TEXT: dict[str, str] = {
    "reference": "emulated",
    "scaled_mm": "by torch._scaled_mm",
    "deep_gemm": "by DeepGEMM",
}
"""How each is named in logs and reports."""

_HOPPER, _BLACKWELL = 9, 10


class Device(Protocol):
    """What of a ``Backend`` decides."""

    @property
    def name(self) -> str: ...

    def fp8_granularities(self) -> tuple[str, ...]: ...


def _require_bf16_of_rows(recipe: str, device: Device, bf16: bool) -> None:
    if device.name == "cuda" and not bf16 and recipe not in native_recipes(("tensor",)):
        raise ConfigError(
            f"fp8_recipe {recipe} without bf16 on cuda; expected bf16, the only result that torch._scaled_mm "
            "has there with scales per row. Set --bf16, or --fp8-recipe tensorwise."
        )


def chosen(backend: str, recipe: str, device: Device, *, bf16: bool) -> Kernels:
    """What computes ``recipe`` on ``device`` where ``fp8_backend`` is ``backend``.

    ``auto`` is the reference on the CPU, and ``torch._scaled_mm`` elsewhere. ``bf16``: whether the model
    computes in bf16 otherwise. Raises ConfigError where the choice is not installed or cannot compute the
    recipe here.
    """
    granularities = device.fp8_granularities()
    if backend == "auto":
        require_possible(recipe, device.name, granularities)
        if device.name == "cpu":
            return "reference"
        _require_bf16_of_rows(recipe, device, bf16)
        return "scaled_mm"
    if backend == "reference":
        return "reference"
    if backend == "scaled_mm":
        # torch has it on the CPU too, without FP8 arithmetic.
        known = native_recipes(("tensor", "row") if device.name == "cpu" else granularities)
        if recipe not in known:
            raise ConfigError(
                f"fp8_backend scaled_mm with fp8_recipe {recipe} on this {device.name} device; expected a "
                f"recipe whose scales torch._scaled_mm knows here: {', '.join(known) or 'none'}. Set "
                "--fp8-recipe, or --fp8-backend reference, which emulates every recipe."
            )
        _require_bf16_of_rows(recipe, device, bf16)
        return "scaled_mm"
    if backend == "deep_gemm":
        _require_deep_gemm(recipe, device, bf16)
        return "deep_gemm"
    raise ConfigError(f"fp8_backend is {backend!r}; expected one of {', '.join(CHOICES)}. Set --fp8-backend.")


def _require_deep_gemm(recipe: str, device: Device, bf16: bool) -> None:
    way_out = "Set --fp8-backend auto, or reference, which emulates every recipe."
    if recipe != "blockwise":
        raise ConfigError(
            f"fp8_backend deep_gemm with fp8_recipe {recipe}; expected blockwise, the scales of 1x128 and "
            f"128x128 that its kernels know. Set --fp8-recipe blockwise. {way_out}"
        )
    if not bf16:
        raise ConfigError(
            f"fp8_backend deep_gemm without bf16, which its kernels return; set --bf16. {way_out}"
        )
    if device.name != "cuda":
        raise ConfigError(
            f"fp8_backend deep_gemm on a {device.name} device; expected cuda with compute capability 9 or "
            f"10. {way_out}"
        )
    import torch

    capability = torch.cuda.get_device_capability()
    if capability[0] not in (_HOPPER, _BLACKWELL):
        raise ConfigError(
            f"fp8_backend deep_gemm on {torch.cuda.get_device_name()} with compute capability "
            f"{capability[0]}.{capability[1]}; expected 9 or 10. {way_out}"
        )
    deep_gemm()


def deep_gemm() -> Any:
    """The module ``deep_gemm``. Raises ConfigError where it is not installed, cannot be imported, or has no
    ``fp8_gemm_nt`` (version 2)."""
    try:
        module = importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"fp8_backend deep_gemm: the package deep_gemm cannot be imported ({error}); expected DeepGEMM "
            "2. Install it, or leave --fp8-backend out."
        ) from error
    if not hasattr(module, "fp8_gemm_nt"):
        version = getattr(module, "__version__", "of unknown version")
        raise ConfigError(
            f"fp8_backend deep_gemm: deep_gemm {version} has no fp8_gemm_nt; expected version 2, built with "
            "CUDA 12.3 or later. Install it, or leave --fp8-backend out."
        )
    return module


def libraries() -> dict[str, bool]:
    """Which kernels are installed, by name; imports none of the packages."""
    import torch

    return {
        "torch._scaled_mm": hasattr(torch, "_scaled_mm"),
        "torch._scaled_grouped_mm": hasattr(torch, "_scaled_grouped_mm"),
        "deep_gemm": importlib.util.find_spec("deep_gemm") is not None,
        "transformer_engine": importlib.util.find_spec("transformer_engine") is not None,
    }
