"""Multi-latent attention in Megatron-Core's layer specs, and what else of 0.9.0 is in its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_SPECS = "megatron.core.models.gpt.gpt_layer_specs"


def _spec(
    original: Callable[..., Any], *args: Any, multi_latent_attention: bool | None = False, **kwargs: Any
) -> Any:
    """With the argument of Megatron-Core 0.12. The parts are put in when a model is built: its
    configuration, too, must ask for latent attention, and knows which layers there are."""
    spec = original(*args, **kwargs)
    if multi_latent_attention:
        from mt_megatron.layers.mla.self_attention import MLASelfAttention

        spec.submodules.self_attention.module = MLASelfAttention
    return spec


def _allreduce_layernorm_grads(original: Callable[..., None], model: Any, config: Any) -> None:
    """Upstream sums the gradients of every ``q_layernorm`` over the tensor-parallel ranks when
    ``qk_layernorm`` is set, since those of its own attention see some of the heads. MLA's sees what
    they share: without sequence parallelism each rank has the whole gradient already."""
    if getattr(config, "multi_latent_attention", False) and not config.sequence_parallel:
        return
    original(model, config)


def patches(backend: Backend) -> list[Patch]:
    specs = {
        "get_gpt_layer_local_spec": "010e04f8034e502d7243e7964a5c5c63c1da7b6c50e61d6950b95dd9735d44a2",
        "get_gpt_layer_with_transformer_engine_spec": (
            "3b0c1b2d0d897e096b47550d57f1b429bf23f5abc81e6cae70ae21c9e760b690"
        ),
    }
    return [
        *(
            Patch(
                id=f"mla.{name.removeprefix('get_gpt_layer_')}",
                target=f"{_SPECS}:{name}",
                kind="wrap",
                feature="mla",
                reason="it takes no multi_latent_attention, as Megatron-Core 0.12's does",
                body=_spec,
                digest=digest,
            )
            for name, digest in specs.items()
        ),
        Patch(
            id="mla.layernorm_grads",
            target="megatron.core.distributed.finalize_model_grads:_allreduce_layernorm_grads",
            kind="wrap",
            feature="mla",
            reason="it would multiply the gradient of the latent's q_layernorm by the tensor-parallel ranks",
            body=_allreduce_layernorm_grads,
            digest="87a5ee4de58aa8007a91d198948efb788e98812a415afee6507e744ac243486b",
        ),
    ]
