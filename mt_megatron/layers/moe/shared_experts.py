"""Shared expert: every token passes it beside its routed experts (DeepSeekMoE, arXiv:2401.06066).

It is an MLP of Megatron-Core's, tensor-parallel like a dense layer's and not divided over expert
parallel ranks, under 0.12's name ``shared_experts``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mt_megatron.layers.mlp_width import of_width

_log = logging.getLogger("mt_megatron")


def build_shared_experts(config: Any, submodules: Any) -> torch.nn.Module:
    """The shared expert of one layer, ``config.moe_shared_expert_intermediate_size`` wide.

    ``submodules`` are those of the layer's routed experts: an ``MLPSubmodules``, whose linears are
    taken (of grouped ones, the linear for one), or None for Megatron-Core's local linears.
    """
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    first, second = _linears(submodules)
    with of_width(config, config.moe_shared_expert_intermediate_size):
        shared: torch.nn.Module = MLP(config, MLPSubmodules(linear_fc1=first, linear_fc2=second))
    return shared


def _linears(submodules: Any) -> tuple[Any, Any]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    if submodules is None:
        return ColumnParallelLinear, RowParallelLinear
    return _for_one(submodules.linear_fc1), _for_one(submodules.linear_fc2)


def _for_one(linear: Any) -> Any:
    # Transformer Engine's TEColumnParallelGroupedLinear stands beside TEColumnParallelLinear.
    return getattr(sys.modules[linear.__module__], linear.__name__.replace("Grouped", ""), linear)


def with_shared_experts(
    routed: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    shared: torch.nn.Module,
    hidden: Tensor,
    *,
    overlap: bool,
    recompute: bool,
) -> tuple[Tensor, Tensor | None]:
    """``routed(hidden)`` plus the shared expert's output, both [s, b, h].

    With ``overlap`` the shared expert runs on a stream of its own beside ``routed``, forward and
    backward, where the device has streams. With ``recompute`` its activations are not kept.
    """
    side = _side_stream(hidden.device.type) if overlap else None
    if side is None:
        output, bias = routed(hidden)
        return output + _forward(shared, hidden, recompute), bias
    device = torch.get_device_module(hidden.device)
    main = device.current_stream()
    _await_parameters(shared)
    side.wait_stream(main)
    with device.stream(side):
        beside = _forward(shared, hidden, recompute)
    # Each is freed while the other stream may still read it: the input in backward, which runs where
    # forward ran, the output behind the sum.
    hidden.record_stream(side)
    beside.record_stream(main)
    output, bias = routed(hidden)
    main.wait_stream(side)
    return output + beside, bias


def _await_parameters(shared: torch.nn.Module) -> None:
    """Let the current stream wait for gathered parameters, as data parallelism's hooks before forward do.

    They wait once for a whole bucket, which has routed experts' weights too. On the side stream alone, the
    main one would read those before they have come. Run again they do nothing.
    """
    for module in shared.modules():
        for hook in module._forward_pre_hooks.values():
            if getattr(hook, "__qualname__", "").startswith("DistributedDataParallel."):
                hook(module, ())


def _forward(shared: torch.nn.Module, hidden: Tensor, recompute: bool) -> Tensor:
    def run(hidden: Tensor) -> Tensor:
        output, bias = shared(hidden)
        summed: Tensor = output if bias is None else output + bias
        return summed

    if not recompute:
        return run(hidden)
    from megatron.core import tensor_parallel

    output: Tensor = tensor_parallel.checkpoint(run, False, hidden)
    return output


@cache
def _side_stream(device_type: str) -> Any:
    """One stream for the shared experts of all layers; None where the device has none."""
    if device_type == "cpu":
        _log.info(
            "moe_shared_expert_overlap: the shared expert runs after the routed ones, since the cpu has no "
            "streams"
        )
        return None
    return torch.get_device_module(device_type).Stream()
