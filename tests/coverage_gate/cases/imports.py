"""Every module of megatron.core is imported under the patch; what cannot be says which package it lacks."""

from __future__ import annotations

import importlib
import pkgutil

from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch

# Modules that cannot be imported without a package of the CUDA world -> words of upstream's refusal.
MAY_REFUSE = {
    "datasets.retro": "faiss",
    "models.mamba.mamba_layer_specs": "mamba-ssm is required",
    "ssm.mamba_mixer": "mamba-ssm is required",
    "ssm.triton_cache_manager": "triton is required",
}


@case(world=0)
def every_module() -> None:
    import megatron.core

    refused: dict[str, str] = {}
    imported = []
    for found in pkgutil.walk_packages(megatron.core.__path__, "megatron.core.", onerror=lambda name: None):
        name = found.name.removeprefix("megatron.core.")
        try:
            imported.append(importlib.import_module(found.name))
        except Exception as error:  # noqa: BLE001 - Retro raises a bare one
            refused[name] = f"{type(error).__name__}: {error}"
    surprising = {k: v for k, v in refused.items() if k not in MAY_REFUSE or MAY_REFUSE[k] not in v}
    assert not surprising, surprising
    assert len(imported) + len(refused) > 150, f"only {len(imported)} modules were found"


@case(world=0)
def tensor_types_of_half_precision_wrappers() -> None:
    from megatron.core.transformer import module

    x = torch.ones(3)
    (half,) = module.fp32_to_float16((x,), lambda value: value.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16 and half.device.type == DEVICE
    assert module.float16_to_fp32(half).dtype == torch.float32
    assert module.float16_to_fp32(torch.ones(3, dtype=torch.half)).dtype == torch.float32
