"""Exact parameter counts of a decoder by closed form, per module, without building anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What decides how many parameters Megatron-Core's ``GPTModel`` has; the names are its own."""

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the residual stream."""

    ffn_hidden_size: int
    """Width of the feed-forward network, or of each expert."""

    num_attention_heads: int
    """Query heads."""

    num_query_groups: int
    """Key and value heads."""

    kv_channels: int
    """Dimensions of one head."""

    vocab_size: int
    """Rows of the embedding as stored (pass the padded size for a padded model)."""

    gated_linear_unit: bool = False
    """Whether the first feed-forward matrix has a gate half (SwiGLU, GEGLU)."""

    add_bias_linear: bool = True
    """Whether linears have biases (the output layer never has one)."""

    add_qkv_bias: bool = False
    """Whether the QKV linear has a bias even without ``add_bias_linear``."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """LayerNorm has weight and bias, RMSNorm weight alone."""

    qk_layernorm: bool = False
    """Whether queries and keys are normalised per head."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Learned positions have parameters, the others none."""

    max_position_embeddings: int = 0
    """Rows of the learned position embedding."""

    untie_embeddings_and_output_weights: bool = False
    """Whether the output layer has weights of its own."""

    num_moe_experts: int | None = None
    """Experts per layer; None for a dense model."""

    moe_router_topk: int = 2
    """Experts that one token uses."""

    moe_grouped_gemm: bool = False
    """Whether experts are grouped, which leaves their biases out."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by kind of module, summed over all layers."""

    embedding: int
    """Word embedding and learned positions."""

    attention: int
    """QKV and output projections, with the norms of queries and keys."""

    mlp: int
    """Feed-forward networks: both matrices, or all experts."""

    router: int
    """Routers of a mixture of experts."""

    norms: int
    """Norms before attention and feed-forward, and the final one."""

    head: int
    """The output layer; 0 when it shares the embedding."""

    inactive: int
    """Parameters of the experts that one token does not use."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.mlp + self.router + self.norms + self.head

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.inactive


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Parameters of the whole model, on however many processes it is spread.

    Upstream: ``GPTModel``, ``SelfAttention``, ``MLP``, ``MoELayer`` of megatron-core 0.9.0.
    """
    hidden, layers = shape.hidden_size, shape.num_layers
    bias = int(shape.add_bias_linear)
    norm = 2 if shape.normalization == "LayerNorm" else 1

    query = shape.num_attention_heads * shape.kv_channels
    qkv = query + 2 * shape.num_query_groups * shape.kv_channels
    attention = hidden * qkv + qkv * int(shape.add_bias_linear or shape.add_qkv_bias)
    attention += query * hidden + hidden * bias
    if shape.qk_layernorm:
        attention += 2 * norm * shape.kv_channels

    fc1 = shape.ffn_hidden_size * (2 if shape.gated_linear_unit else 1)
    expert_bias = bias if shape.num_moe_experts is None or not shape.moe_grouped_gemm else 0
    mlp = hidden * fc1 + shape.ffn_hidden_size * hidden + (fc1 + hidden) * expert_bias
    experts = shape.num_moe_experts or 1
    idle = 0 if shape.num_moe_experts is None else experts - min(shape.moe_router_topk, experts)

    learned = shape.position_embedding_type == "learned_absolute"
    return ParameterCount(
        embedding=(shape.vocab_size + (shape.max_position_embeddings if learned else 0)) * hidden,
        attention=layers * attention,
        mlp=layers * experts * mlp,
        router=0 if shape.num_moe_experts is None else layers * experts * hidden,
        norms=(2 * layers + 1) * norm * hidden,
        head=shape.vocab_size * hidden if shape.untie_embeddings_and_output_weights else 0,
        inactive=layers * idle * mlp,
    )


def padded_vocab_size(vocab_size: int, *, divisible_by: int, tensor_parallel: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel``, Megatron-LM's rule."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple
