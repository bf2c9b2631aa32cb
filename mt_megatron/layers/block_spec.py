"""Layer specs of a block whose layers differ (experts or dense, kind of attention), from one layer's spec.

Megatron-Core 0.9.0 builds every layer of a model from the same spec. Where the configuration asks for
more, its specs are varied layer by layer, with the linear and norm classes that they name: local,
Transformer Engine's or another package's.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from .transformer_fields import moe_layer_pattern


def is_varied(config: Any) -> bool:
    """Whether ``config`` asks for layers that differ from the spec it comes with."""
    return bool(config.multi_latent_attention) or not has_uniform_layers(config)


def has_uniform_layers(config: Any) -> bool:
    """Whether all layers hold the same parameters, so that a checkpoint can stack them.

    False for any model whose ``moe_layer_freq`` is a list or above 1, also where the list happens
    to be all of one kind, as in later versions of Megatron-Core.
    """
    return config.num_moe_experts is None or config.moe_layer_freq == 1


def layer_specs(spec: Any, config: Any) -> list[Any]:
    """A ``ModuleSpec`` for each of ``config.num_layers`` layers, from the ``spec`` of one.

    Raises ``ConfigError`` when ``moe_layer_freq`` places experts and ``spec`` has none.
    """
    pattern = moe_layer_pattern(config)
    experts = has_experts(spec)
    if not has_uniform_layers(config) and not experts:
        raise ConfigError(
            "moe_layer_freq places layers with experts, and the layer spec has none; expected one made with "
            f"num_experts={config.num_moe_experts}. Change the spec or leave moe_layer_freq out."
        )
    with_attention = _with_attention(spec, config)
    if not experts or all(pattern):
        return [with_attention] * int(config.num_layers)
    dense = dense_layer(with_attention, spec)
    return [with_attention if kind else dense for kind in pattern]


def has_experts(spec: Any) -> bool:
    """Whether the layer of ``spec`` has experts instead of an MLP."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    mlp = getattr(spec.submodules, "mlp", None)
    module = getattr(mlp, "module", mlp)
    return isinstance(module, type) and issubclass(module, BaseMoELayer)


def dense_layer(spec: Any, like: Any | None = None) -> Any:
    """``spec`` with a dense MLP in place of its experts.

    The MLP's linears are of the classes that the attention of ``like`` (``spec`` itself where it is
    None) uses. Where the first of them has the layer norm inside of it, so has the MLP's.
    """
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    attention = (like or spec).submodules.self_attention.submodules
    # A spec of latent attention has no one linear for queries, keys and values.
    first = getattr(attention, "linear_qkv", None) or attention.linear_kv_up_proj
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=first, linear_fc2=attention.linear_proj))
    changes: dict[str, Any] = {"mlp": mlp}
    if _norm_is_in_linear(like or spec):
        changes["pre_mlp_layernorm"] = IdentityOp
    return replace(spec, submodules=replace(spec.submodules, **changes))


def _norm_is_in_linear(spec: Any) -> bool:
    from megatron.core.transformer.identity_op import IdentityOp

    return spec.submodules.input_layernorm is IdentityOp


def _with_attention(spec: Any, config: Any) -> Any:
    if not config.multi_latent_attention:
        return spec
    from mt_megatron.layers.mla.self_attention import mla_spec

    changes: dict[str, Any] = {"self_attention": mla_spec(spec.submodules.self_attention, config)}
    # Latent attention reads its input with several linears, none of which may have the norm inside.
    if _norm_is_in_linear(spec):
        changes["input_layernorm"] = _norm_beside(spec)
    # The map says under which name a norm inside of a linear is saved; later versions save the norms
    # around latent attention under their own.
    changes["sharded_state_dict_keys_map"] = {}
    return replace(spec, submodules=replace(spec.submodules, **changes))


def _norm_beside(spec: Any) -> Any:
    linear = spec.submodules.self_attention.submodules.linear_qkv
    module = sys.modules[linear.__module__]
    norm = getattr(module, "TENorm", None)
    if norm is None:
        raise ConfigError(
            f"multi-latent attention needs a norm before it, and {linear.__module__}, where the spec's "
            f"{linear.__name__} comes from, has no TENorm; give the layer spec an input_layernorm"
        )
    return norm
