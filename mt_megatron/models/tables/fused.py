"""Names of norms in Transformer Engine's layers, which hold a norm inside of the linear that follows it.

Megatron-Core's local layers keep norms apart in the model and yet give those of dense layers the fused
names in distributed checkpoints, so that either kind of layer loads the other's.
"""

from __future__ import annotations

_INPUT = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_LATENT = (
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
_MLP = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
_INPUT_OF_LATENT = ("input_layernorm.", "self_attention.linear_q_proj.layer_norm_")


def fused_name(name: str, *, is_moe: bool, latent: bool) -> str:
    """The name in Transformer Engine's layers of the tensor that local layers call ``name``.

    ``is_moe``: its layer is a mixture of experts, whose norm stays apart. ``latent``: its attention is
    multi-latent, where the norms stay apart.
    """
    pairs = (*(() if latent else (_INPUT,)), *(() if is_moe else (_MLP,)))
    for apart, fused in pairs:
        if f".{apart}" in name:
            return name.replace(f".{apart}", f".{fused}")
    return name


def local_name(name: str) -> str:
    """The name in local layers of a tensor, whichever of both names is given; also of the norms that
    Megatron-Core 0.12 has inside of the up-projections of multi-latent attention."""
    for apart, fused in (_INPUT, *_LATENT, _MLP, _INPUT_OF_LATENT):
        if f".{fused}" in name:
            return name.replace(f".{fused}", f".{apart}")
    return name
