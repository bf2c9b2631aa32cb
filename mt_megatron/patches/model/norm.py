"""The local layer specs get RMSNorm, and norms that work under sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def _init(
    original: Callable[..., None],
    self: Any,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> None:
    """Make the instance one of ours before it has any state.

    Specs bind the class early, under several names; whoever builds it gets ours without being
    found. (A ``__new__`` could not be taken away again: CPython keeps the slot.) A subclass has
    its own idea of what it is and is left to upstream.
    """
    from megatron.core.transformer.torch_layer_norm import WrappedTorchLayerNorm

    if type(self) is not WrappedTorchLayerNorm:
        original(self, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)
        return
    _become_ours(self, config, hidden_size, eps)


def _apex_init(
    original: Callable[..., None],
    self: Any,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = True,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> None:
    """Specs hold this class for every normalization where Apex is installed. LayerNorm stays upstream's."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    if type(self) is not FusedLayerNorm or config.normalization != "RMSNorm":
        original(self, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)
        return
    _become_ours(self, config, hidden_size, eps)


def _become_ours(norm: Any, config: Any, hidden_size: int, eps: float) -> None:
    from mt_megatron.layers.norm import norm_class

    cls = norm_class(config)
    object.__setattr__(norm, "__class__", cls)
    # The other arguments name a kernel or repeat, sometimes wrongly, what the config says.
    cls.__init__(norm, config, hidden_size, eps)


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="norm.wrapped_torch_layer_norm",
            target="megatron.core.transformer.torch_layer_norm:WrappedTorchLayerNorm.__init__",
            kind="wrap",
            feature="norm",
            reason="it refuses RMSNorm, sequence parallelism and zero-centred gain",
            body=_init,
            digest="5fdcba3255f4adba0b7be50d7a13f871d03da0d136c57b25c04627a59c50940d",
        ),
        Patch(
            id="norm.fused_layer_norm",
            target="megatron.core.fusions.fused_layer_norm:FusedLayerNorm.__init__",
            kind="wrap",
            feature="norm",
            reason="with Apex every local spec holds it, and it refuses RMSNorm",
            body=_apex_init,
            digest="a2e17067db67ef6829b0352f43892ba5aec3625ec9d10aa3a4d94d75b8c0c3ce",
        ),
    ]
