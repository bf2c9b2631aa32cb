"""The model and how it is spread: fields beside those that Megatron-Core has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CoreOptions:
    """Values of one of Megatron-Core's dataclasses, by field name; read them as attributes."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Every settable field that has its home here, defaults included. Callables and dtypes are
    named by text (``"silu"``, ``"bfloat16"``)."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name != "values" and name in self.values:
            return self.values[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's shape. TransformerConfig's fields are attributes too: ``config.model.num_layers``."""

    preset: str | None = None
    """Name of the preset in ``mt_megatron/config/presets`` that the other values started from."""

    family: str = "llama"
    """Key of the model family that builds the model (``mt_megatron.seams.family``)."""

    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Whose layers: Megatron-Core's local ones or its Transformer Engine spec. auto: Transformer
    Engine on CUDA where it is installed."""

    vocab_size: int | None = None
    """Entries of the vocabulary before padding. None: the tokenizer's."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times ``tensor_model_parallel_size``."""

    mask_padded_vocabulary: bool = True
    """Whether rows that pad the vocabulary are left out of the softmax, so that the loss does not depend
    on the padding. Megatron-LM has them in it."""

    max_position_embeddings: int | None = None
    """Longest sequence the model is built for. None: ``seq_length``; required for learned positions."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""

    rotary_base: float = 10000.0
    """Theta of the rotary embedding."""

    rotary_percent: float = 1.0
    """Share of each head's dimensions that is rotated, in (0, 1]."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Positions are divided by this factor. None: not at all."""

    untie_embeddings_and_output_weights: bool = False
    """Whether the output layer has weights of its own."""

    core: CoreOptions = field(default_factory=CoreOptions)
    """TransformerConfig's fields that no other section holds."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name != "core":
            return getattr(self.core, name)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model and the data are spread over processes."""

    tensor_model_parallel_size: int = 1
    """Processes that share every layer's matrices."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline stage (interleaved 1F1B). None or 1: the plain 1F1B schedule."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """The same said by layers: chunks = layers per stage / this."""

    context_parallel_size: int = 1
    """Processes that share every sequence."""

    cp_comm_type: Literal["all_gather", "p2p"] | None = None
    """How they exchange keys and values: at once, or round a ring while computing. None: at once."""

    expert_model_parallel_size: int = 1
    """Processes that share the experts."""

    allow_tensor_parallel_across_nodes: bool = False
    """Whether a tensor-parallel group may have processes on several nodes, which is slow."""

    sequence_parallel: bool = False
    """Whether norms and dropout are split along the sequence within a tensor-parallel group."""

    use_distributed_optimizer: bool = False
    """Whether optimizer state is spread over the data-parallel processes."""

    overlap_grad_reduce: bool = False
    """Whether gradients are reduced while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Whether parameters are gathered while the next forward pass already runs."""
