"""Which of Megatron-Core's layer specs a model is built from: Transformer Engine's, or the local one."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from typing import Any

from mt_megatron.backends.current import current_backend
from mt_megatron.errors import ConfigError, PatchError
from mt_megatron.fp8.layers import run_recipe

_log = logging.getLogger("mt_megatron")


def gpt_layer_spec(config: Any, transformer: Any) -> Any:
    """Megatron-Core's own ``ModuleSpec`` of a GPT layer for ``config`` (a ``TrainingConfig``), with experts
    where it has some; which layers are dense is decided for each when the model is built.

    ``config.model.transformer_impl`` decides: ``local``, ``transformer_engine``, or ``auto``, which
    takes Transformer Engine where it can be used and says in one log line which it is and why.
    ``transformer`` is the ``TransformerConfig`` of the model.

    Raises ``ConfigError`` when Transformer Engine was asked for by name and cannot be used.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    if uses_transformer_engine(config):
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=transformer.num_moe_experts,
            moe_grouped_gemm=transformer.moe_grouped_gemm,
            qk_layernorm=transformer.qk_layernorm,
            fp8=transformer.fp8,
        )
    return gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=transformer.qk_layernorm,
    )


def uses_transformer_engine(config: Any) -> bool:
    """Whether ``gpt_layer_spec`` gives Transformer Engine's layers for ``config``."""
    asked = config.model.transformer_impl
    if asked == "local":
        return False
    obstacle = _obstacle(_device_type(), config.model, config.data.reset_attention_mask)
    if asked == "transformer_engine" and obstacle:
        raise ConfigError(
            f"transformer_impl is transformer_engine, and {obstacle}; change that, or use "
            "--transformer-impl local or auto"
        )
    _say(asked, obstacle)
    return not obstacle


@cache
def _say(asked: str, obstacle: str) -> None:
    if obstacle:
        _log.info("transformer_impl %s: Megatron-Core's local layers, since %s", asked, obstacle)
    else:
        _log.info("transformer_impl %s: Transformer Engine's layers, by Megatron-Core's own spec", asked)


def _device_type() -> str:
    try:
        return current_backend().device_type
    except PatchError:
        return "cpu"


def _obstacle(device_type: str, model: Any, documents_apart: bool) -> str:
    """Why Transformer Engine's layers cannot be used here; empty when they can."""
    if run_recipe(model) is not None:
        return "fp8_recipe is set, which Megatron-Core's local linears compute"
    if device_type != "cuda":
        return f"Transformer Engine needs CUDA and the backend's device is {device_type}"
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    from megatron.core.models.gpt import gpt_layer_specs

    if not gpt_layer_specs.HAVE_TE:
        return f"Megatron-Core cannot import it: {_import_error()}"
    if documents_apart:
        return "reset_attention_mask is set, and its causal attention looks at no mask"
    if model.multi_latent_attention:
        return "multi_latent_attention is set, which has been built with local layers only"
    if model.qk_layernorm and not hasattr(gpt_layer_specs, "FusedLayerNorm"):
        return "qk_layernorm is set, for which Megatron-Core's Transformer Engine spec needs Apex"
    return ""


def _import_error() -> str:
    try:
        importlib.import_module("megatron.core.extensions.transformer_engine")
    except (ImportError, AttributeError, OSError) as error:
        return str(error)
    return "it could not when its layer specs were imported"
