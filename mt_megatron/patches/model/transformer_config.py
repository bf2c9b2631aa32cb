"""``TransformerConfig`` and all its subclasses accept Megatron-Core 0.12's fields for what is added here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ConfigError
from mt_megatron.layers.transformer_checks import check_fields, check_read
from mt_megatron.layers.transformer_fields import dataclass_fields
from mt_megatron.patching.in_force import is_in_force
from mt_megatron.patching.spec import Patch

_MODULE = "megatron.core.transformer.transformer_config"


def _post_init(original: Callable[[Any], None], self: Any) -> None:
    from mt_megatron.fp8.checks import fp8_problems  # Its tables of recipes: 3 % of the time of patch().

    _choose_fp8(self)
    check_fields(vars(self))
    check_read(vars(self), is_in_force)
    if found := fp8_problems(vars(self)):
        raise ConfigError("TransformerConfig: " + "; ".join(found))
    with _as_upstream_knows_it(self):
        original(self)


def _choose_fp8(config: Any) -> None:
    """Upstream's ``fp8`` (a format) means delayed scaling by Transformer Engine. With a recipe, or where
    Transformer Engine is not installed, it is the recipe's format, and upstream must not see it."""
    if config.fp8 is not None and config.fp8_recipe is None and find_spec("transformer_engine") is None:
        if absent := [name for name in ("fp8", "linear") if not is_in_force(name)]:
            raise ConfigError(
                f"TransformerConfig: fp8 is {config.fp8!r} and Transformer Engine is not installed; expected "
                f"it, or {' and '.join(absent)} among the features of patch(), which compute the recipe "
                f"delayed. Add {', '.join(absent)} or leave fp8 out."
            )
        config.fp8_recipe = "delayed"
    if config.fp8_recipe is not None and config.fp8 is not None:
        config.fp8_recipe_format, config.fp8 = config.fp8, None


@contextmanager
def _as_upstream_knows_it(config: Any) -> Iterator[None]:
    """Upstream allows a capacity with two kinds of balancing only, and chunks of one size only."""
    balancing, chunks = config.moe_router_load_balancing_type, config.virtual_pipeline_model_parallel_size
    if balancing == "seq_aux_loss":
        config.moe_router_load_balancing_type = "aux_loss"
    if config.pipeline_model_parallel_layout is not None:
        config.virtual_pipeline_model_parallel_size = None
    try:
        yield
    finally:
        config.moe_router_load_balancing_type = balancing
        config.virtual_pipeline_model_parallel_size = chunks


def _getattr(name: str) -> Any:
    """A module has no attribute of this name: perhaps the configuration of a later version is meant."""
    if name == "MLATransformerConfig":
        from mt_megatron.layers.mla.transformer_config import mla_transformer_config

        return mla_transformer_config()
    raise AttributeError(f"module 'megatron.core.transformer' has no attribute {name!r}")


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="model_config.fields",
            target=f"{_MODULE}:TransformerConfig",
            kind="fields",
            feature="model_config",
            reason="it has no fields for experts of their own width, shared experts, dense layers among "
            "them, newer routing, latent attention, stretched positions and multi-token prediction",
            body=dataclass_fields(),
            digest="53b4c34c192ba469300b0cf3ac8fa3ee26b375bec7ac920b737e859c85ed92d2",
        ),
        Patch(
            id="model_config.checks",
            target=f"{_MODULE}:TransformerConfig.__post_init__",
            kind="wrap",
            feature="model_config",
            reason="the added fields are checked with the others, and a capacity goes with seq_aux_loss too",
            body=_post_init,
            digest="ebf78ceb5fc6cc425c68a890bad458c3642ddb146161b7850d37c1c3eabe605a",
            after=("model_config.fields",),
        ),
        *(
            Patch(
                id=f"model_config.mla_{where}",
                target=f"{module}:__getattr__",
                kind="add",
                feature="model_config",
                reason="MLATransformerConfig, which later versions have, is made when somebody asks for it",
                body=_getattr,
                after=("model_config.fields",),
            )
            for where, module in (("module", _MODULE), ("package", "megatron.core.transformer"))
        ),
    ]
