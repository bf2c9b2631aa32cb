"""Linears with the constructors of Megatron-Core's ``extensions/transformer_engine.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from mt_megatron.layers.mla.spec import ReplicatedLinear
from mt_megatron.layers.norm import norm_class, normalised
from mt_megatron.layers.te.names import MODULE

_log = logging.getLogger("mt_megatron")
_Init = Callable[[Tensor], Any]


class TELinear(torch.nn.Module):
    """Base of the linears. ``TELinear(inputs, outputs, parallel_mode=...)`` is the column- or row-parallel
    one; for ``parallel_mode=None`` a linear that every rank has whole.

    Arguments: ``input_size``, ``output_size``, and by keyword ``parallel_mode``, ``config``, ``init_method``,
    ``bias``, ``skip_bias_add``, ``skip_weight_param_allocation``, ``tp_comm_buffer_name``, ``is_expert``.
    Calls return output and bias; the bias is None unless ``skip_bias_add``.
    """

    __module__ = MODULE

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is TELinear:
            mode = kwargs.get("parallel_mode", args[2] if len(args) > 2 else None)
            if mode not in _BY_MODE:
                raise ValueError(f"parallel_mode is {mode!r}; expected one of {list(_BY_MODE)}")
            return super().__new__(_BY_MODE[mode])
        return super().__new__(cls)


class TEColumnParallelLinear(TELinear, ColumnParallelLinear):  # type: ignore[misc]
    """``ColumnParallelLinear`` that never gathers its output.

    Raises ValueError for ``gather_output`` and ``skip_weight_param_allocation``.
    """

    __module__ = MODULE

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: _Init,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        refuse(gather_output=gather_output, skip_weight_param_allocation=skip_weight_param_allocation)
        _note_overlap(bool(config.tp_comm_overlap))
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
        )


class TERowParallelLinear(TELinear, RowParallelLinear):  # type: ignore[misc]
    """``RowParallelLinear`` whose input is split over the ranks. Raises ValueError where it is not."""

    __module__ = MODULE

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: _Init,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        if not input_is_parallel:
            raise ValueError("input_is_parallel is False; expected True, each rank's share of the inputs")
        _note_overlap(bool(config.tp_comm_overlap))
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
        )


class TELayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """The norm that ``config.normalization`` names, then a ``TEColumnParallelLinear``.

    The norm's parameters [input_size] are ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``.
    Raises ValueError for ``gather_output``, ``is_expert`` and ``skip_weight_param_allocation``.
    """

    __module__ = MODULE

    layer_norm_bias: Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: _Init,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        refuse(
            gather_output=gather_output,
            is_expert=is_expert,
            skip_weight_param_allocation=skip_weight_param_allocation,
        )
        _note_overlap(bool(config.tp_comm_overlap))
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            skip_bias_add=skip_bias_add,
        )
        with self.weight.device:
            norm = norm_class(config)(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight = norm.weight
        self.register_parameter("layer_norm_bias", norm.bias)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, input_size] -> [s, b, output_size of this rank], and the bias where it is not added."""
        config = self.config
        found: tuple[Tensor, Tensor | None] = super().forward(
            normalised(
                config.normalization,
                input,
                self.layer_norm_weight,
                self.layer_norm_bias,
                eps=config.layernorm_epsilon,
                zero_centered=bool(config.layernorm_zero_centered_gamma),
            )
        )
        return found


class _Column(TEColumnParallelLinear):
    """``TELinear(parallel_mode="column")``."""

    def __init__(self, *args: Any, parallel_mode: str, is_expert: bool = False, **given: Any) -> None:
        super().__init__(*args, gather_output=False, is_expert=is_expert, **given)


class _Row(TERowParallelLinear):
    """``TELinear(parallel_mode="row")``."""

    def __init__(
        self,
        *args: Any,
        parallel_mode: str,
        skip_weight_param_allocation: bool = False,
        is_expert: bool = False,
        **given: Any,
    ) -> None:
        refuse(skip_weight_param_allocation=skip_weight_param_allocation)
        super().__init__(*args, input_is_parallel=True, is_expert=is_expert, **given)


class _Replicated(TELinear, ReplicatedLinear):
    """``TELinear(parallel_mode=None)``."""

    def __init__(
        self,
        *args: Any,
        parallel_mode: None = None,
        skip_weight_param_allocation: bool = False,
        **given: Any,
    ) -> None:
        refuse(skip_weight_param_allocation=skip_weight_param_allocation)
        super().__init__(*args, **given)


_BY_MODE: dict[str | None, type[TELinear]] = {"column": _Column, "row": _Row, None: _Replicated}


def refuse(**asked: bool) -> None:
    """Raises ValueError for arguments that Transformer Engine's linears do not take."""
    if given := [name for name, value in asked.items() if value]:
        raise ValueError(f"{' and '.join(given)} given True; expected False in a Transformer Engine spec")


@cache
def _note_overlap(asked: bool) -> None:
    if asked:
        _log.warning(
            "tp_comm_overlap asked for: Transformer Engine is absent, and tensor-parallel linears run their "
            "collectives beside dgrad and wgrad only, as the local layer spec's"
        )
