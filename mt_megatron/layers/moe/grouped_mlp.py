"""What ``GroupedMLP`` is here: two parameters with every local expert's matrices, and no other package.

Upstream's parameters are two-dimensional in name and are read as [experts, inputs, outputs], the order in
which CUTLASS wanted them. Ours say what they hold, [experts, outputs, inputs], as any linear's weight and
as ``SequentialMLP``'s: slices of a flattened parameter are slices of a ``SequentialMLP`` checkpoint, which
is what makes the distributed optimizer's state interchangeable.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_megatron.layers.moe import token_dispatch
from mt_megatron.layers.moe.experts import experts_swiglu, grouped_linear
from mt_megatron.seams.grouped_gemm import groups_from

WEIGHTS = ("weight1", "weight2")
_PARTITION = {"weight1": 1, "weight2": 2}


def arrange_weights(module: Any) -> None:
    """Turn what upstream's constructor made into ``weight1`` [experts, (2) f, h] and ``weight2``
    [experts, h, f]: the same matrices, so that a seed means the same model with and without us."""
    for name in WEIGHTS:
        made = getattr(module, name)
        weight = torch.nn.Parameter(_as_linears(made.data, name, module), requires_grad=made.requires_grad)
        for attribute, value in vars(made).items():
            setattr(weight, attribute, value)
        if hasattr(weight, "partition_dim"):
            weight.partition_dim = _PARTITION[name]
        setattr(module, name, weight)
    module.register_load_state_dict_pre_hook(_accept_upstream_order)


def _as_linears(flat: Tensor, name: str, module: Any) -> Tensor:
    """Upstream's two-dimensional weight as [experts, outputs, inputs]."""
    experts, hidden = module.num_local_experts, module.config.hidden_size
    inputs = hidden if name == "weight1" else flat.numel() // (experts * hidden)
    return flat.view(experts, inputs, -1).transpose(1, 2).contiguous()


def _accept_upstream_order(module: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """A state dict of upstream's own ``GroupedMLP`` is two-dimensional; ours is not, so each can be told."""
    for name in WEIGHTS:
        found = state_dict.get(f"{prefix}{name}")
        if isinstance(found, Tensor) and found.dim() == 2 and found.numel() == getattr(module, name).numel():
            state_dict[f"{prefix}{name}"] = _as_linears(found, name, module)


def forward(module: Any, hidden: Tensor, tokens_per_expert: Tensor) -> tuple[Tensor, None]:
    """``GroupedMLP.forward``: rows grouped by expert, ``tokens_per_expert`` of each; or, where the token
    dispatcher left the gathering to us, every token once. Returns the same rows, and no bias."""
    handover: token_dispatch.Handover | None = None
    dispatcher = getattr(module, "token_dispatcher", None)
    if dispatcher is not None:
        handover = token_dispatch.of(dispatcher).take()
    config = module.config
    options = {"gradient_accumulation_fusion": bool(config.gradient_accumulation_fusion)}
    if handover is not None:
        groups = handover.routing.groups
    else:
        groups = groups_from(tokens_per_expert, hidden.shape[0], hidden.device)
    if config.gated_linear_unit and config.activation_func is F.silu:
        routing, probs = (groups, None) if handover is None else (handover.routing, handover.probs)
        return experts_swiglu(hidden, probs, module.weight1, module.weight2, routing, **options), None
    rows = hidden if handover is None else handover.routing.take(hidden)
    rows = module.activation_func(grouped_linear(rows, module.weight1, groups, **options))
    if handover is not None:
        weights = handover.routing.probs_of_rows(handover.probs)
        rows = rows * weights.unsqueeze(1).to(rows.dtype)
    rows = grouped_linear(rows, module.weight2, groups, **options)
    return (rows if handover is None else handover.routing.combine(rows)), None
