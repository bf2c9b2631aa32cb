"""Which class stands under which name of ``megatron.core.extensions.transformer_engine``.

The questions are those that a ``BackendSpecProvider`` of later Megatron-Core answers: column and row
linear, norm and linear in one, norm, core attention, experts' linears. The activation is MLP's own.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def fill(module: ModuleType) -> None:
    """Give ``module`` the classes and functions. Classes bear its name, so that pickle finds them there."""
    from mt_megatron.layers.te import attention, grouped, linears, others

    names: dict[str, Any] = {
        "TEColumnParallelLinear": linears.TEColumnParallelLinear,
        "TERowParallelLinear": linears.TERowParallelLinear,
        "TELinear": linears.TELinear,
        "TELayerNormColumnParallelLinear": linears.TELayerNormColumnParallelLinear,
        "TENorm": others.TENorm,
        "TEDotProductAttention": attention.TEDotProductAttention,
        "TEGroupedLinear": grouped.TEGroupedLinear,
        "TEColumnParallelGroupedLinear": grouped.TEColumnParallelGroupedLinear,
        "TERowParallelGroupedLinear": grouped.TERowParallelGroupedLinear,
        "TEDelayedScaling": others.TEDelayedScaling,
        "TECudaRNGStatesTracker": others.TECudaRNGStatesTracker,
        "te_checkpoint": others.te_checkpoint,
        "SplitAlongDim": others.split_along_dim,
        "condition_init_method": others.condition_init_method,
        # Callers that find None refuse cpu_offloading by name.
        "get_cpu_offload_context": None,
    }
    vars(module).update(names)
