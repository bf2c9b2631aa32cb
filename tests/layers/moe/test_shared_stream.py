"""Overlapped shared expert: what it does before it leaves the main stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from mt_megatron.layers.moe.shared_experts import _await_parameters


def test_parameters_are_awaited_once_and_others_hooks_are_left_alone() -> None:
    shared: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    awaited, called = [], []
    group = SimpleNamespace(finish_param_sync=lambda **options: awaited.append(options))
    ddp: Any = SimpleNamespace(
        use_forward_hook=True,
        param_to_bucket_group=dict.fromkeys(shared.parameters(), group),
        ddp_config=SimpleNamespace(align_param_gather=False),
        overlap_param_gather_with_optimizer_step=False,
    )
    for module in shared:
        module.register_forward_pre_hook(DistributedDataParallel._make_forward_pre_hook(ddp))
        module.register_forward_pre_hook(lambda module, args: called.append(args[0]))
    _await_parameters(shared)
    assert len(awaited) == 4 and called == []
