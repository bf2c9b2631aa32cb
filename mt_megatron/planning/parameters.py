"""Exact parameter counts of a model by closed form, per module, without building anything."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mt_megatron.layers.transformer_fields import moe_pattern


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that decide how many parameters Megatron-Core's ``GPTModel`` or ``BertModel`` has; the names are
    its own."""

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the residual stream."""

    ffn_hidden_size: int
    """Width of the feed-forward network, and of each expert without ``moe_ffn_hidden_size``."""

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
    """Experts of a mixture-of-experts layer; None for a dense model."""

    moe_router_topk: int = 2
    """Experts that one token uses."""

    moe_grouped_gemm: bool = False
    """Whether experts are grouped, which leaves their biases out."""

    moe_ffn_hidden_size: int | None = None
    """Width of each expert. None: ``ffn_hidden_size``."""

    moe_layer_freq: int | tuple[int, ...] = 1
    """Which layers are mixtures: every so many from the first, or 1 and 0 for each layer."""

    moe_shared_expert_intermediate_size: int | None = None
    """Width of the experts that every token uses, together; None: there are none."""

    moe_router_enable_expert_bias: bool = False
    """Whether routers keep a bias for each expert: a buffer, no parameter."""

    multi_latent_attention: bool = False
    """Whether attention is multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None = None
    """Width of the compressed queries; None: queries come from the hidden state directly."""

    kv_lora_rank: int = 512
    """Width of the compressed keys and values."""

    qk_head_dim: int = 128
    """Dimensions of a query's and key's head without position."""

    qk_pos_emb_head_dim: int = 64
    """Dimensions of a query's head, and of the one key, that are rotated."""

    v_head_dim: int = 128
    """Dimensions of a value's head."""

    mtp_num_layers: int | None = None
    """Depths of multi-token prediction, all on the last stage; None: none."""

    masked_words: bool = False
    """Whether it is a ``BertModel``: a dense layer and a norm before an output layer with a bias."""

    sentence_order: bool = False
    """Whether that has two token types, a pooler and a head of two classes."""

    @property
    def pattern(self) -> tuple[int, ...]:
        """For each layer 1 where it is a mixture of experts, else 0."""
        if self.num_moe_experts is None:
            return (0,) * self.num_layers
        return _pattern(self.moe_layer_freq, self.num_layers)

    @property
    def expert_size(self) -> int:
        """Width of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def query_size(self) -> int:
        """Elements of one token's queries, all heads together."""
        if self.multi_latent_attention:
            return self.num_attention_heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        return self.num_attention_heads * self.kv_channels

    @property
    def attention_output_size(self) -> int:
        """Elements of one token's attended values, all heads together."""
        if self.multi_latent_attention:
            return self.num_attention_heads * self.v_head_dim
        return self.num_attention_heads * self.kv_channels


@lru_cache(maxsize=256)
def _pattern(freq: int | tuple[int, ...], layers: int) -> tuple[int, ...]:
    return tuple(moe_pattern(freq if isinstance(freq, int) else list(freq), layers))


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by kind of module, summed over all layers; those of multi-token prediction apart."""

    embedding: int
    """Word embedding, learned positions and token types."""

    attention: int
    """QKV (or latent) and output projections, with the norms inside of the attention."""

    mlp: int
    """Feed-forward networks: dense ones and all experts, shared ones included."""

    router: int
    """Routers of a mixture of experts."""

    norms: int
    """Norms before attention and feed-forward, and the final one."""

    head: int
    """The output layer; 0 when it shares the embedding. Of a ``BertModel`` both heads, less the shared
    embedding."""

    inactive: int
    """Parameters of the experts that one token does not use."""

    experts: int = 0
    """Of ``mlp``: all routed experts."""

    shared_experts: int = 0
    """Of ``mlp``: the shared experts."""

    mtp: int = 0
    """Multi-token prediction: its projections, norms and layers. Embedding and head are the model's own."""

    buffers: int = 0
    """Entries of the experts' biases, which no optimizer moves; those of multi-token prediction apart."""

    mtp_buffers: int = 0
    """The same in multi-token prediction."""

    @property
    def total(self) -> int:
        """All parameters of the model itself, as published totals count them."""
        return self.embedding + self.attention + self.mlp + self.router + self.norms + self.head

    @property
    def trained(self) -> int:
        """``total`` and multi-token prediction: every parameter that is trained."""
        return self.total + self.mtp

    @property
    def active(self) -> int:
        """Parameters of the model itself that one token uses."""
        return self.total - self.inactive


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Parameters of the whole model, on however many processes it is spread.

    Upstream: ``GPTModel``, ``BertModel``, ``SelfAttention``, ``MLP``, ``MoELayer`` of megatron-core 0.9.0,
    and the modules that this package adds under the names of 0.12.
    """
    hidden, layers = shape.hidden_size, shape.num_layers
    norm = 2 if shape.normalization == "LayerNorm" else 1
    mixtures, experts = sum(shape.pattern), shape.num_moe_experts or 0
    dense = layers - mixtures
    expert, shared = _expert(shape), _shared(shape)
    idle = experts - min(shape.moe_router_topk, experts)
    learned = shape.position_embedding_type == "learned_absolute"
    depths = shape.mtp_num_layers or 0
    rows = shape.vocab_size + (shape.max_position_embeddings if learned else 0) + 2 * shape.sentence_order
    output = shape.vocab_size * hidden if shape.untie_embeddings_and_output_weights else 0
    if shape.masked_words:
        output += hidden * hidden + hidden + norm * hidden + shape.vocab_size
    if shape.sentence_order:
        output += hidden * hidden + hidden + 2 * hidden + 2
    biases = experts if shape.moe_router_enable_expert_bias else 0
    return ParameterCount(
        embedding=rows * hidden,
        attention=layers * _attention(shape),
        mlp=dense * _dense(shape) + mixtures * (experts * expert + shared),
        router=mixtures * experts * hidden,
        norms=(2 * layers + 1) * norm * hidden,
        head=output,
        inactive=mixtures * idle * expert,
        experts=mixtures * experts * expert,
        shared_experts=mixtures * shared,
        mtp=depths * (_layer(shape, shape.pattern[-1:] == (1,)) + 2 * hidden * hidden + 3 * norm * hidden),
        buffers=mixtures * biases,
        mtp_buffers=depths * sum(shape.pattern[-1:]) * biases,
    )


def _layer(shape: ModelShape, mixture: bool) -> int:
    """One layer with its two norms."""
    norms = 2 * (2 if shape.normalization == "LayerNorm" else 1) * shape.hidden_size
    if not mixture:
        return norms + _attention(shape) + _dense(shape)
    experts = shape.num_moe_experts or 0
    return norms + _attention(shape) + experts * (_expert(shape) + shape.hidden_size) + _shared(shape)


def _attention(shape: ModelShape) -> int:
    if shape.multi_latent_attention:
        return _latent_attention(shape)
    hidden, query = shape.hidden_size, shape.query_size
    qkv = query + 2 * shape.num_query_groups * shape.kv_channels
    attention = hidden * qkv + qkv * int(shape.add_bias_linear or shape.add_qkv_bias)
    attention += query * hidden + hidden * int(shape.add_bias_linear)
    if shape.qk_layernorm:
        attention += 2 * (2 if shape.normalization == "LayerNorm" else 1) * shape.kv_channels
    return attention


def _latent_attention(shape: ModelShape) -> int:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    compressed = shape.kv_lora_rank + (shape.q_lora_rank or 0)
    attention = hidden * (shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
    attention += shape.kv_lora_rank * heads * (shape.qk_head_dim + shape.v_head_dim)
    if shape.q_lora_rank is None:
        attention += hidden * shape.query_size
    else:
        attention += shape.q_lora_rank * (hidden + shape.query_size)
    attention += heads * shape.v_head_dim * hidden + hidden * int(shape.add_bias_linear)
    return attention + (2 if shape.normalization == "LayerNorm" else 1) * compressed


def _feed_forward(shape: ModelShape, width: int, *, biased: bool) -> int:
    fc1 = width * (2 if shape.gated_linear_unit else 1)
    return shape.hidden_size * (fc1 + width) + (fc1 + shape.hidden_size) * int(biased)


def _dense(shape: ModelShape) -> int:
    return _feed_forward(shape, shape.ffn_hidden_size, biased=shape.add_bias_linear)


def _expert(shape: ModelShape) -> int:
    biased = shape.add_bias_linear and not shape.moe_grouped_gemm
    return _feed_forward(shape, shape.expert_size, biased=biased)


def _shared(shape: ModelShape) -> int:
    width = shape.moe_shared_expert_intermediate_size
    return 0 if width is None else _feed_forward(shape, width, biased=False)


def padded_vocab_size(vocab_size: int, *, divisible_by: int, tensor_parallel: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel``, Megatron-LM's rule."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple
