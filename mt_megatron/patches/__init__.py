"""What is changed in Megatron-Core, one file per concern; ``collect`` gathers them for a backend.

device/           ``torch.cuda`` means the active backend; random numbers, process groups, transfers
compat/           Megatron-Core 0.9.0 on newer torch, numpy, zarr; Megatron-LM's scripts
model/            layers, layer specs and model configuration
optimizer/        Adam without Apex, parameter groups
pipeline/         schedules as data in the place of upstream's; stages laid out as a V
events/           upstream's functions emit ``seams.events``
errata/           defects of 0.9.0
catalogue         the declared patches as a file, listed without importing torch
declared.json.gz  that file
upstream.json.gz  hashes of the upstream lines that the patches were written against
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..patching.spec import Patch

if TYPE_CHECKING:
    from ..backends.base import Backend

CONCERNS = (
    "device.redirection",
    "device.tensor_methods",
    "device.moved_parameters",
    "device.rng",
    "errata.wrong_results",
    "device.eager_fusions",
    "device.process_groups",
    "device.pending_transfers",
    "compat.torch_numpy",
    "compat.zarr_v3",
    "compat.checkpoint_writers",
    "compat.padded_vocabulary",
    "compat.transformer_engine",
    "errata.loopback_listener",
    "errata.gradient_buckets",
    "errata.encoder_decoder",
    "errata.weights",
    "errata.blends",
    "model.linear",
    "model.norm",
    "model.attention",
    "model.context_parallel",
    "model.te_layers",
    "model.swiglu",
    "model.experts",
    "model.token_dispatcher",
    "model.rotary_kernel",
    "model.mtp",
    "model.cross_entropy",
    "optimizer.fused_adam",
    "pipeline.transfers",
    "events.emitters",
    "compat.dataset_helpers",
    "compat.loader_workers",
    "optimizer.param_groups",
    "optimizer.expert_optimizer",
    "model.transformer_config",
    "model.block_spec",
    "model.rope_scaling",
    "model.mla",
    "model.moe_ffn",
    "model.shared_experts",
    "model.stage_layers",
    "model.fp8",
    "model.router",
    "compat.megatron_lm",
    "pipeline.schedules",
    "pipeline.v_shape",
    "events.script",
)
"""Modules of this package, in the order of their patches; each has ``patches(backend) -> list[Patch]``."""


def collect(backend: Backend) -> list[Patch]:
    """Every patch that is declared for ``backend``, in the order of ``CONCERNS``."""
    found: list[Patch] = []
    for concern in CONCERNS:
        found += import_module(f"{__name__}.{concern}").patches(backend)
    return found


def reading_fields(features: frozenset[str]) -> list[str]:
    """Those of ``features`` whose patches read what the feature ``model_config`` adds."""
    return sorted(features & {"moe", "mla", "mtp", "rope", "fp8"})
