"""The parameter tensors of one rank's model chunk, in the order in which Megatron-Core registers them.

The order decides where buckets and shards begin, so memory of weights, gradients and optimizer state
follows from this list exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mt_megatron.models.parameters import ModelShape


@dataclass(frozen=True, kw_only=True)
class ParameterTensor:
    """One parameter as a rank holds it."""

    numel: int
    """Elements on this rank."""

    expert: bool = False
    """Whether it is of an expert that this rank does not share with its whole data-parallel group."""

    shared_embedding: bool = False
    """Whether it is one of the two copies of a tied embedding on the first and last stage, which get
    a bucket of their own."""


@dataclass(frozen=True, kw_only=True)
class ChunkPlace:
    """Which part of the model a chunk is."""

    layers: int
    """Transformer layers in it."""

    first: bool
    """Whether it has the embedding."""

    last: bool
    """Whether it has the final norm and the output layer."""


def chunk_tensors(
    shape: ModelShape, place: ChunkPlace, *, tensor_parallel: int = 1, expert_parallel: int = 1
) -> list[ParameterTensor]:
    """The tensors of one chunk, ``shape.vocab_size`` being the padded size.

    Sizes must divide (``validate`` sees to it). Upstream: ``GPTModel``, ``TransformerLayer`` of
    megatron-core 0.9.0, local layer spec.
    """
    hidden = shape.hidden_size
    rows = shape.vocab_size // tensor_parallel
    tied = not shape.untie_embeddings_and_output_weights
    found: list[ParameterTensor] = []
    if place.first:
        found.append(ParameterTensor(numel=rows * hidden, shared_embedding=tied and not place.last))
        if shape.position_embedding_type == "learned_absolute":
            found.append(ParameterTensor(numel=shape.max_position_embeddings * hidden))
    layer = list(_layer(shape, tensor_parallel, expert_parallel))
    for _ in range(place.layers):
        found += layer
    if place.last:
        found += _norm(shape, hidden)
        if not tied or not place.first:
            found.append(ParameterTensor(numel=rows * hidden, shared_embedding=tied))
    return found


def _norm(shape: ModelShape, size: int) -> list[ParameterTensor]:
    return [ParameterTensor(numel=size)] * (2 if shape.normalization == "LayerNorm" else 1)


def _layer(shape: ModelShape, tp: int, ep: int) -> Iterator[ParameterTensor]:
    hidden = shape.hidden_size
    query = shape.num_attention_heads * shape.kv_channels // tp
    qkv = query + 2 * shape.num_query_groups * shape.kv_channels // tp
    yield from _norm(shape, hidden)
    yield ParameterTensor(numel=hidden * query)
    if shape.add_bias_linear:
        yield ParameterTensor(numel=hidden)
    yield ParameterTensor(numel=hidden * qkv)
    if shape.add_bias_linear or shape.add_qkv_bias:
        yield ParameterTensor(numel=qkv)
    if shape.qk_layernorm:
        yield from _norm(shape, shape.kv_channels)
        yield from _norm(shape, shape.kv_channels)
    yield from _norm(shape, hidden)
    if shape.num_moe_experts is None:
        yield from _mlp(shape, tp, expert=False)
        return
    yield ParameterTensor(numel=shape.num_moe_experts * hidden)
    for _ in range(shape.num_moe_experts // ep):
        yield from _mlp(shape, tp, expert=ep > 1)


def _mlp(shape: ModelShape, tp: int, *, expert: bool) -> Iterator[ParameterTensor]:
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size // tp
    fc1 = ffn * (2 if shape.gated_linear_unit else 1)
    yield ParameterTensor(numel=fc1 * hidden, expert=expert)
    if shape.add_bias_linear:
        yield ParameterTensor(numel=fc1, expert=expert)
    yield ParameterTensor(numel=hidden * ffn, expert=expert)
    if shape.add_bias_linear:
        yield ParameterTensor(numel=hidden, expert=expert)
