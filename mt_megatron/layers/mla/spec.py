"""MLA in Megatron-Core's layer specs, with the spec's own linear and norm classes; the replicated linear."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.layers.attention.core import DotProductAttention

_log = logging.getLogger("mt_megatron")


@dataclass(kw_only=True)
class MLASelfAttentionSubmodules:
    """Classes or specs of MLA's parts, by Megatron-Core 0.12's names; scripts exchange them."""

    linear_q_proj: Any = None
    """hidden -> heads, where there is no latent of queries (``q_lora_rank`` None)."""

    linear_q_down_proj: Any = None
    """hidden -> the queries' latent; every rank has all of it."""

    linear_q_up_proj: Any = None
    """The queries' latent -> heads."""

    linear_kv_down_proj: Any = None
    """hidden -> the keys' and values' latent and the shared rotary key; every rank has all of it."""

    linear_kv_up_proj: Any = None
    """The latent -> heads, of each first its key and then its value."""

    core_attention: Any = None
    """Built with ``softmax_scale``, and called with values of another head size than keys'."""

    linear_proj: Any = None
    """heads -> hidden."""

    q_layernorm: Any = None
    """Of the queries' latent."""

    kv_layernorm: Any = None
    """Of the keys' and values' latent."""


def mla_submodules(given: Any) -> MLASelfAttentionSubmodules:
    """MLA's parts in the place of ``given``, a ``SelfAttentionSubmodules`` of the local or of
    Transformer Engine's spec; ``given`` itself where they are MLA's already."""
    if isinstance(given, MLASelfAttentionSubmodules):
        return given
    column, norm = _column_and_norm(given)
    if given.core_attention is not DotProductAttention:
        _say_core_attention(getattr(given.core_attention, "__name__", str(given.core_attention)))
    return MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=ReplicatedLinear,
        linear_q_up_proj=column,
        linear_kv_down_proj=ReplicatedLinear,
        linear_kv_up_proj=column,
        core_attention=DotProductAttention,
        linear_proj=given.linear_proj,
        q_layernorm=norm,
        kv_layernorm=norm,
    )


def norm_is_in_linear(given: Any) -> bool:
    """Whether the parts ``given`` include the norm of the layer's input, as Transformer Engine's do."""
    return not isinstance(given, MLASelfAttentionSubmodules) and given.linear_qkv is getattr(
        sys.modules[given.linear_qkv.__module__], "TELayerNormColumnParallelLinear", None
    )


def _column_and_norm(given: Any) -> tuple[Any, Any]:
    if norm_is_in_linear(given):
        beside: Any = sys.modules[given.linear_qkv.__module__]
        return beside.TEColumnParallelLinear, beside.TENorm
    from megatron.core.models.gpt import gpt_layer_specs

    return given.linear_qkv, gpt_layer_specs.LNImpl


@cache
def _say_core_attention(name: str) -> None:
    _log.info(
        "multi_latent_attention: core attention by mt_megatron's DotProductAttention in the place of %s, "
        "which in 0.9.0 takes neither a softmax scale nor values of another head size",
        name,
    )


class ReplicatedLinear(torch.nn.Module):
    """``input @ weight.T`` with ``weight`` [output_size, input_size], the same on all ranks.

    A latent is small and the same for all heads. Splitting its projection over the ranks (as
    Megatron-Core 0.12 does) saves its weight and products, and costs a gather in front of each norm;
    here each rank computes it, and nothing is sent.

    Gradients: without sequence parallelism every rank sees all tokens, and gets the whole gradient if
    what follows gives whole gradients (a ColumnParallelLinear does). Under sequence parallelism a
    rank sees its share of the tokens; the weight is marked ``sequence_parallel``, so that
    ``finalize_model_grads`` sums the gradients. The weight is drawn from random numbers that the ranks
    share. GEMMs go through ``seams.gemm``; arguments are those of ColumnParallelLinear.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = False,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        super().__init__()
        if bias or is_expert:
            raise ConfigError(
                f"a replicated linear was asked for with bias={bias} and is_expert={is_expert}; expected "
                "neither: use ColumnParallelLinear"
            )
        self.config = config
        self.input_size, self.output_size = input_size, output_size
        # As upstream's layers choose it: on the host, or where the caller's context says, or on the device.
        place = {} if config.use_cpu_initialization else {"device": layers.torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(
            layers.torch.empty(output_size, input_size, dtype=config.params_dtype, **place)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            self._initialise(init_method)

    def _initialise(self, init_method: Callable[[Tensor], Any]) -> None:
        if self.config.use_cpu_initialization:
            # In fp32 and from the default generator, which upstream's layers also advance alike on all ranks.
            drawn = torch.empty(self.output_size, self.input_size, dtype=torch.float32)
            init_method(drawn)
            self.weight.data.copy_(drawn)
            return
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            init_method(self.weight)

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        """[..., input_size] -> [..., output_size], and no bias."""
        fusion = bool(self.config.gradient_accumulation_fusion)
        return linear_of_rank(input, self.weight, gradient_accumulation_fusion=fusion), None

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size}"


def linear_of_rank(input: Tensor, weight: Tensor, *, gradient_accumulation_fusion: bool) -> Tensor:
    """``input @ weight.T`` through Megatron's function for tensor-parallel linears, nothing communicated."""
    arguments = {
        "input": input,
        "weight": weight,
        "bias": None,
        "gradient_accumulation_fusion": gradient_accumulation_fusion,
        "sequence_parallel": False,
        "allreduce_dgrad": False,
    }
    # By name at each call: whoever patches these functions patches this one's callers.
    output: Tensor
    if weight.requires_grad:
        output = layers.linear_with_grad_accumulation_and_async_allreduce(**arguments)
    else:
        # Upstream wants the older name of allreduce_dgrad too, here alone.
        output = layers.linear_with_frozen_weight(**arguments, async_grad_allreduce=False)
    return output
