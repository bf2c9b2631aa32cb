"""The parameter tensors of one rank's model chunk, in the order in which Megatron-Core registers them.

The order decides where buckets and shards begin, so memory of weights, gradients and optimizer state
follows from this list exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mt_megatron.planning.parameters import ModelShape


@dataclass(frozen=True, kw_only=True)
class ParameterTensor:
    """One parameter as a rank holds it."""

    numel: int
    """Elements on this rank."""

    expert: bool = False
    """Whether it is of an expert that this rank does not share with its whole data-parallel group."""

    replicated: bool = False
    """Whether every tensor-parallel rank has all of it."""

    shared_embedding: bool = False
    """Whether it is one of the two copies of a tied embedding on the first and last stage, which get
    a bucket of their own."""


@dataclass(frozen=True, kw_only=True)
class ChunkPlace:
    """Part of the model that a chunk is."""

    layers: int
    """Transformer layers in it."""

    first: bool
    """Whether it has the embedding."""

    last: bool
    """Whether it has the final norm, the output layer and multi-token prediction."""

    mixtures: tuple[int, ...] | None = None
    """For each layer 1 where it is a mixture of experts, else 0. None: all are, in a model with experts."""

    def kinds(self, shape: ModelShape) -> tuple[bool, ...]:
        """For each layer whether it is a mixture of experts."""
        if self.mixtures is not None:
            return tuple(map(bool, self.mixtures))
        return (shape.num_moe_experts is not None,) * self.layers

    def depths(self, shape: ModelShape) -> int:
        """How many depths of multi-token prediction are in it."""
        return (shape.mtp_num_layers or 0) if self.last else 0


def chunk_tensors(
    shape: ModelShape, place: ChunkPlace, *, tensor_parallel: int = 1, expert_parallel: int = 1
) -> list[ParameterTensor]:
    """The tensors of one chunk, ``shape.vocab_size`` being the padded size.

    Sizes must divide (``validate`` sees to it). Upstream: ``GPTModel``, ``BertModel``, ``TransformerLayer``
    of megatron-core 0.9.0, local layer specs.
    """
    hidden = shape.hidden_size
    table = shape.vocab_size // tensor_parallel * hidden
    tied = not shape.untie_embeddings_and_output_weights
    predicts, apart = bool(shape.mtp_num_layers), place.first != place.last
    positions = [
        ParameterTensor(
            numel=shape.max_position_embeddings * hidden,
            replicated=True,
            shared_embedding=predicts and apart,
        )
    ]
    if shape.position_embedding_type != "learned_absolute":
        positions = []
    found: list[ParameterTensor] = []
    if place.first:
        found.append(ParameterTensor(numel=table, shared_embedding=(tied or predicts) and apart))
        found += positions
        if shape.sentence_order:
            found.append(ParameterTensor(numel=2 * hidden, replicated=True))
    kinds = {
        mixture: list(_layer(shape, tensor_parallel, expert_parallel, mixture=mixture))
        for mixture in (False, True)
    }
    for mixture in place.kinds(shape):
        found += kinds[mixture]
    if place.last:
        found += _norm(shape, hidden)
        if shape.masked_words:
            found += _biased(hidden, hidden) + _norm(shape, hidden)
        if not tied or not place.first:
            found.append(ParameterTensor(numel=table, shared_embedding=tied))
        if shape.masked_words:
            found.append(ParameterTensor(numel=shape.vocab_size // tensor_parallel))
        if shape.sentence_order:
            found += _biased(hidden, 2) + _biased(hidden, hidden)
        for _ in range(place.depths(shape)):
            found += _norm(shape, hidden) + _norm(shape, hidden)
            found.append(ParameterTensor(numel=2 * hidden * hidden // tensor_parallel))
            found += kinds[shape.pattern[-1:] == (1,)]
            found += _norm(shape, hidden)
        if predicts and not place.first:
            # The copy of the embedding; one with the output layer where they are tied.
            found += [ParameterTensor(numel=table, shared_embedding=True)] * int(not tied) + positions
    return found


def _biased(inputs: int, outputs: int) -> list[ParameterTensor]:
    """A linear with a bias, whole on every rank."""
    return [ParameterTensor(numel=size, replicated=True) for size in (inputs * outputs, outputs)]


def _norm(shape: ModelShape, size: int) -> list[ParameterTensor]:
    return [ParameterTensor(numel=size, replicated=True)] * (2 if shape.normalization == "LayerNorm" else 1)


def _layer(shape: ModelShape, tp: int, ep: int, *, mixture: bool) -> Iterator[ParameterTensor]:
    yield from _norm(shape, shape.hidden_size)
    yield from _latent_attention(shape, tp) if shape.multi_latent_attention else _attention(shape, tp)
    yield from _norm(shape, shape.hidden_size)
    if mixture:
        yield from _mixture(shape, tp, ep)
    else:
        yield from _mlp(shape, shape.ffn_hidden_size // tp, biased=shape.add_bias_linear)


def _attention(shape: ModelShape, tp: int) -> Iterator[ParameterTensor]:
    hidden, query = shape.hidden_size, shape.query_size // tp
    qkv = query + 2 * shape.num_query_groups * shape.kv_channels // tp
    yield ParameterTensor(numel=hidden * query)
    if shape.add_bias_linear:
        yield ParameterTensor(numel=hidden, replicated=True)
    yield ParameterTensor(numel=hidden * qkv)
    if shape.add_bias_linear or shape.add_qkv_bias:
        yield ParameterTensor(numel=qkv)
    if shape.qk_layernorm:
        yield from _norm(shape, shape.kv_channels)
        yield from _norm(shape, shape.kv_channels)


def _latent_attention(shape: ModelShape, tp: int) -> Iterator[ParameterTensor]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads // tp
    yield ParameterTensor(numel=heads * shape.v_head_dim * hidden)
    if shape.add_bias_linear:
        yield ParameterTensor(numel=hidden, replicated=True)
    if shape.q_lora_rank is None:
        yield ParameterTensor(numel=hidden * shape.query_size // tp)
    else:
        yield ParameterTensor(numel=hidden * shape.q_lora_rank, replicated=True)
        yield ParameterTensor(numel=shape.q_lora_rank * shape.query_size // tp)
    down = shape.kv_lora_rank + shape.qk_pos_emb_head_dim
    yield ParameterTensor(numel=hidden * down, replicated=True)
    yield ParameterTensor(numel=shape.kv_lora_rank * heads * (shape.qk_head_dim + shape.v_head_dim))
    if shape.q_lora_rank is not None:
        yield from _norm(shape, shape.q_lora_rank)
    yield from _norm(shape, shape.kv_lora_rank)


def _mixture(shape: ModelShape, tp: int, ep: int) -> Iterator[ParameterTensor]:
    experts = shape.num_moe_experts or 0
    width, local = shape.expert_size // tp, experts // ep
    yield ParameterTensor(numel=experts * shape.hidden_size, replicated=True)
    if shape.moe_grouped_gemm:
        fc1 = width * (2 if shape.gated_linear_unit else 1)
        yield ParameterTensor(numel=local * fc1 * shape.hidden_size, expert=ep > 1)
        yield ParameterTensor(numel=local * width * shape.hidden_size, expert=ep > 1)
    else:
        for _ in range(local):
            yield from _mlp(shape, width, biased=shape.add_bias_linear, expert=ep > 1)
    if shape.moe_shared_expert_intermediate_size is not None:
        yield from _mlp(shape, shape.moe_shared_expert_intermediate_size // tp, biased=False)


def _mlp(shape: ModelShape, width: int, *, biased: bool, expert: bool = False) -> Iterator[ParameterTensor]:
    hidden = shape.hidden_size
    fc1 = width * (2 if shape.gated_linear_unit else 1)
    yield ParameterTensor(numel=fc1 * hidden, expert=expert)
    if biased:
        yield ParameterTensor(numel=fc1, expert=expert)
    yield ParameterTensor(numel=hidden * width, expert=expert)
    if biased:
        yield ParameterTensor(numel=hidden, replicated=True, expert=expert)
