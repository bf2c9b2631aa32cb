"""The ``ModelShape`` of a configuration's ``model`` section, and of its padded form."""

from __future__ import annotations

import dataclasses
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.planning.parameters import ModelShape, padded_vocab_size

_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def shape_of(model: Any) -> ModelShape:
    """What decides the number of parameters, from ``config.model``. Imports neither torch nor megatron.

    Raises ``ConfigError`` naming every size that is not set.
    """
    missing = [name for name in _SIZES if not getattr(model, name)]
    if model.position_embedding_type == "learned_absolute" and model.max_position_embeddings is None:
        missing.append("max_position_embeddings")
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(
            f"the model is not complete: {', '.join(missing)} not set. Set {flags}, or choose a --model."
        )
    if model.kv_channels is None and not model.multi_latent_attention:
        raise ConfigError(
            f"hidden_size {model.hidden_size} is no multiple of num_attention_heads "
            f"{model.num_attention_heads}; expected one, or --kv-channels to be given."
        )
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(ModelShape)}
    freq = values["moe_layer_freq"]
    values |= {
        "kv_channels": model.kv_channels or 0,
        "max_position_embeddings": model.max_position_embeddings or 0,
        "moe_layer_freq": freq if isinstance(freq, int) else tuple(freq),
        "mtp_num_layers": model.mtp_num_layers or None,
    }
    return ModelShape(**values)


def padded_shape_of(config: Any) -> ModelShape:
    """The shape of ``config`` (a ``TrainingConfig``) with its vocabulary padded as it is stored."""
    shape = shape_of(config.model)
    padded = padded_vocab_size(
        shape.vocab_size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel=config.parallel.tensor_model_parallel_size,
    )
    return dataclasses.replace(shape, vocab_size=padded)
