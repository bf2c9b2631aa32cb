"""A stub in the place of Transformer Engine: classes that record what they were built with.

They compute nothing. What they show is which class is built where, and how large.
"""

from __future__ import annotations

from typing import Any

import torch

built: list[tuple[str, tuple[int, ...]]] = []
"""Class name and sizes of everything that was built."""


class _Recording(torch.nn.Module):
    def __init__(self, *sizes: int, config: Any = None, **options: Any) -> None:
        super().__init__()
        built.append((type(self).__name__, sizes))


class TELayerNormColumnParallelLinear(_Recording):
    pass


class TEColumnParallelLinear(_Recording):
    pass


class TERowParallelLinear(_Recording):
    pass


class TEColumnParallelGroupedLinear(_Recording):
    pass


class TERowParallelGroupedLinear(_Recording):
    pass


class TENorm(_Recording):
    pass


class TEDotProductAttention(_Recording):
    pass


def layer_spec(*, grouped: bool) -> Any:
    """A layer with experts as Megatron-Core's Transformer Engine spec lays it out."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    experts = (TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)
    linears = experts if grouped else (TEColumnParallelLinear, TERowParallelLinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=TELayerNormColumnParallelLinear,
                    core_attention=TEDotProductAttention,
                    linear_proj=TERowParallelLinear,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=TENorm,
            mlp=ModuleSpec(
                module=MoELayer,
                submodules=MLPSubmodules(linear_fc1=linears[0], linear_fc2=linears[1]),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
