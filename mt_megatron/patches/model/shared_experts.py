"""``moe_shared_expert_intermediate_size``: layers with experts get one that every token passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"


def _init(
    original: Callable[..., None], self: Any, config: Any, submodules: Any = None, layer_number: Any = None
) -> None:
    original(self, config, submodules, layer_number)
    if config.moe_shared_expert_intermediate_size is not None:
        from mt_megatron.layers.moe.shared_experts import build_shared_experts

        self.shared_experts = build_shared_experts(config, submodules)


def _forward(original: Callable[..., Any], self: Any, hidden_states: Any) -> Any:
    shared = getattr(self, "shared_experts", None)
    if shared is None:
        return original(self, hidden_states)
    from mt_megatron.layers.moe.shared_experts import with_shared_experts

    return with_shared_experts(
        partial(original, self),
        shared,
        hidden_states,
        overlap=self.config.moe_shared_expert_overlap,
        recompute=self.moe_layer_recompute and self.training,
    )


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="moe_layer.shared_experts",
            target=f"{_LAYER}.__init__",
            kind="wrap",
            feature="moe",
            reason="it has routed experts only",
            body=_init,
            digest="b270b7fd88abdf9fd3c31142c2a385f20d2adf149905732ca8a82c1ac0ac6eb1",
        ),
        Patch(
            id="moe_layer.forward",
            target=f"{_LAYER}.forward",
            kind="wrap",
            feature="moe",
            reason="the shared expert's output is part of the layer's",
            body=_forward,
            digest="80d4728233d1b16585dd976d30b92e3609915aeed224522257e4c3236da3fd2a",
        ),
    ]
