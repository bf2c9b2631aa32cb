"""What else Megatron-Core takes from its Transformer Engine module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import Tensor

from mt_megatron.layers.te.names import MODULE


class TENorm:
    """``TENorm(config, hidden_size, eps)`` is the local layer spec's norm: Apex's LayerNorm where Apex is
    installed, else the one of ``layers.norm`` that ``config.normalization`` names. Raises ConfigError for an
    unknown name."""

    __module__ = MODULE

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import LNImpl

        return LNImpl(config, hidden_size, eps)


class TECudaRNGStatesTracker(CudaRNGStatesTracker):  # type: ignore[misc]
    """Megatron-Core's own tracker of the device's random states."""

    __module__ = MODULE


class TEDelayedScaling:
    """Settings of delayed scaling, read from ``config``. Layers compute by ``config.fp8_recipe``, which
    ``config.fp8`` sets to ``delayed``; this only carries the numbers."""

    __module__ = MODULE

    def __init__(
        self,
        config: Any,
        fp8_format: Any,
        override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        self.fp8_format, self.override_linear_precision = fp8_format, override_linear_precision
        self.margin, self.amax_history_len = config.fp8_margin, config.fp8_amax_history_len
        self.amax_compute_algo = config.fp8_amax_compute_algo


def te_checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: Any,
    tp_group: Any,
    *args: Any,
) -> Any:
    """``forward_func(*args)`` by ``tensor_parallel.checkpoint``, which has the tracker and group itself."""
    return tensor_parallel.checkpoint(forward_func, distribute_saved_activations, *args)


def split_along_dim(mixed: Tensor, dim: int, sizes: Any) -> tuple[Tensor, ...]:
    """``torch.split`` with the arguments of Transformer Engine's function."""
    return torch.split(mixed, sizes, dim=dim)


def condition_init_method(config: Any, init_method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """``init_method``, or one that does nothing without ``config.perform_initialization``."""
    return init_method if config.perform_initialization else lambda weight: None
