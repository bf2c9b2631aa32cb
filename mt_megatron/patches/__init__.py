"""What is changed in Megatron-Core, one file per concern; ``collect`` gathers them for a backend."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..patching.spec import Patch

if TYPE_CHECKING:
    from ..backends.base import Backend

CONCERNS = (
    "device",
    "tensor_methods",
    "moved_parameters",
    "rng",
    "errata",
    "eager",
    "groups",
    "p2p",
    "torch_compat",
    "zarr_compat",
    "checkpoint_writers",
    "padded_vocabulary",
    "listeners",
    "linear",
    "norm",
    "attention",
    "context_parallel",
    "swiglu",
    "experts",
    "token_dispatcher",
    "rotary",
    "mtp",
    "cross_entropy",
    "optimizer",
    "events",
    "dataset_helpers",
    "loader_workers",
    "param_groups",
    "expert_optimizer",
    "model_config",
    "block_spec",
    "rope",
    "mla",
    "moe_ffn",
    "moe_layer",
    "stage_layers",
    "router",
    "training",
)
"""Modules of this package; each has ``patches(backend) -> list[Patch]``."""


def collect(backend: Backend) -> list[Patch]:
    """Every patch that is declared for ``backend``, in the order of ``CONCERNS``."""
    found: list[Patch] = []
    for concern in CONCERNS:
        found += import_module(f"{__name__}.{concern}").patches(backend)
    return found


def reading_fields(features: frozenset[str]) -> list[str]:
    """Those of ``features`` whose patches read what the feature ``model_config`` adds."""
    return sorted(features & {"moe", "mla", "mtp", "rope"})
