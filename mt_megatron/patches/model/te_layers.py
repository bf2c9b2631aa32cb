"""Where Transformer Engine is absent, Megatron-Core's module of its classes is made of our layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.layers.te.classes import fill
from mt_megatron.layers.te.names import MODULE, VERSION
from mt_megatron.patching.spec import Kind, Patch

_SPECS = "megatron.core.models.gpt.gpt_layer_specs"


def _get_te_version(original: Callable[[], Any]) -> Any:
    found = original()
    if found is not None:
        return found
    from packaging.version import Version

    return Version(VERSION)


def _spec(
    original: Callable[..., Any],
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    fp8: str | None = None,
) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if hasattr(gpt_layer_specs, "FusedLayerNorm"):
        return original(num_experts, moe_grouped_gemm, qk_layernorm, fp8)
    spec = original(num_experts, moe_grouped_gemm, False, fp8)
    if qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = gpt_layer_specs.LNImpl
    return spec


_NORMS = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
"""The norm before experts in a checkpoint: of the spec for Transformer Engine, and of the local spec."""


def _load(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """A norm before experts is asked for by the name under which the checkpoint has it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.serialization import load_tensors_metadata

    keyed = [each for each in nested_values(sharded_state_dict) if isinstance(each, ShardedTensor)]
    if any(".mlp.router." in each.key for each in keyed):
        saved = load_tensors_metadata(str(checkpoint_dir))
        for each in keyed:
            for name, other in (_NORMS, _NORMS[::-1]):
                renamed = each.key.replace(f".{name}", f".{other}")
                if each.key not in saved and renamed in saved:
                    each.key = renamed
    return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def patches(backend: Backend) -> list[Patch]:
    def absent(name: str, target: str, kind: Kind, reason: str, body: Any, **more: Any) -> Patch:
        return Patch(
            id=f"te_layers.{name}",
            target=target,
            kind=kind,
            feature="te_layers",
            reason=reason,
            body=body,
            unless=("transformer_engine",),
            **more,
        )

    return [
        absent(
            "module",
            f"{MODULE}:",
            "module",
            "it imports Transformer Engine, and layer specs of every model family import its names",
            fill,
        ),
        absent(
            "older_module",
            "megatron.core.transformer.custom_layers.transformer_engine:",
            "module",
            "scripts take the same names from there",
            fill,
        ),
        absent(
            "version",
            "megatron.core.utils:get_te_version",
            "wrap",
            "callers choose by it between shapes of the classes; ours have that of one version",
            _get_te_version,
            digest="6b36e5a442b35187eb7fb17c93b9f1c7d68db2d64d2dadef77537f5a0f9c9734",
            after=("transformer_engine.get_te_version",),
        ),
        absent(
            "retro_kernels",
            "megatron.core.models.retro.config:RetroConfig.__post_init__",
            "constant",
            "from that version on it wants variables set that choose among Transformer Engine's kernels",
            {"1.3": "1!0"},
            digest="688d1b9b45bbc1936c4ce872413706ca3dd03c9a9c71c345b4eea2e8c8643320",
        ),
        absent(
            "query_norms",
            f"{_SPECS}:get_gpt_layer_with_transformer_engine_spec",
            "wrap",
            "with qk_layernorm it names Apex's norm, also where Apex is absent",
            _spec,
            digest="3b0c1b2d0d897e096b47550d57f1b429bf23f5abc81e6cae70ae21c9e760b690",
        ),
        Patch(
            id="te_layers.norm_of_experts",
            target="megatron.core.dist_checkpointing.serialization:load",
            kind="wrap",
            feature="te_layers",
            reason="both layer specs name the norm before experts otherwise in checkpoints",
            body=_load,
            digest="8229b1999356193c3bab58224603e311e78ecc94ffef46225c402479f1a15553",
        ),
    ]
