"""Floating-point operations of a model per token: forward, training, and what is really executed.

Two per multiply-add of every matrix product; attention over the whole s x s square (the usual
convention, causal kernels do about half of that part); a backward pass is two forward passes. Of a
mixture of experts the ones that a token uses, the shared ones and the router; of multi-token prediction
everything, its pass through the output layer included. This is the one definition: ``ModelFamily.flops``
and MFU use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.planning.activation_options import Recompute
from mt_megatron.planning.parameters import ModelShape
from mt_megatron.planning.shape import padded_shape_of


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """Floating-point operations of one forward pass for one token."""

    projections: int
    """The linears of one layer's attention."""

    up_projections: int
    """Of them: the up-projections of latent attention, which can be computed twice."""

    layer_attention: int
    """Scores and weighted values of one layer."""

    padding: int
    """What values that are padded to the size of keys add to ``layer_attention``; not counted in it."""

    dense: int
    """A dense feed-forward network."""

    router: int
    experts: int
    """The routed experts that one token uses."""

    shared_experts: int
    head: int
    """The output layer, once, with the dense layer that a ``BertModel`` has before it. Its pooler and second
    head, which see one token of a sample, are left out."""

    pattern: tuple[int, ...]
    """For each layer of the model 1 where it is a mixture of experts."""

    depths: int
    """Depths of multi-token prediction, each with a layer like the last one and the output layer."""

    depth_projection: int
    """The projection of one depth's hidden state and embedding."""

    def matrices(self, mixture: bool) -> int:
        """The linears of one layer."""
        if mixture:
            return self.projections + self.router + self.experts + self.shared_experts
        return self.projections + self.dense

    def layer(self, mixture: bool) -> int:
        """One transformer layer."""
        return self.matrices(mixture) + self.layer_attention

    def layers(self, kinds: Iterable[int | bool]) -> int:
        """The layers of these kinds (true: a mixture) together."""
        return sum(self.layer(bool(kind)) for kind in kinds)

    @property
    def depth_kind(self) -> bool:
        """Whether the layer of a depth of multi-token prediction is a mixture."""
        return self.pattern[-1:] == (1,)

    @property
    def multi_token_prediction(self) -> int:
        """All depths, their passes through the output layer included."""
        return self.depths * (self.depth_projection + self.layer(self.depth_kind) + self.head)

    @property
    def total(self) -> int:
        """The whole model."""
        return self.layers(self.pattern) + self.head + self.multi_token_prediction

    @property
    def training(self) -> int:
        """Forward and backward pass, nothing computed twice: what MFU counts."""
        return 3 * self.total


def forward_flops(shape: ModelShape, sequence: int) -> ForwardFlops:
    """For sequences of ``sequence`` tokens; ``shape.vocab_size`` is the padded size."""
    hidden, query, output = shape.hidden_size, shape.query_size, shape.attention_output_size
    matrices = 3 if shape.gated_linear_unit else 2
    projections, up = _projections(shape)
    experts = shape.num_moe_experts or 0
    used = min(shape.moe_router_topk, experts)
    return ForwardFlops(
        projections=2 * projections,
        up_projections=2 * up,
        layer_attention=2 * sequence * (query + output),
        padding=2 * sequence * max(0, query - output) if shape.multi_latent_attention else 0,
        dense=2 * matrices * hidden * shape.ffn_hidden_size,
        router=2 * hidden * experts,
        experts=2 * matrices * hidden * used * shape.expert_size,
        shared_experts=2 * matrices * hidden * (shape.moe_shared_expert_intermediate_size or 0),
        head=2 * hidden * (shape.vocab_size + hidden * shape.masked_words),
        pattern=shape.pattern,
        depths=shape.mtp_num_layers or 0,
        depth_projection=4 * hidden * hidden,
    )


def _projections(shape: ModelShape) -> tuple[int, int]:
    """Elements of the attention's matrices, and of the up-projections among them."""
    hidden, query = shape.hidden_size, shape.query_size
    if not shape.multi_latent_attention:
        keys = 2 * shape.num_query_groups * shape.kv_channels
        return hidden * (query + keys) + query * hidden, 0
    heads = shape.num_attention_heads
    up = (hidden if shape.q_lora_rank is None else shape.q_lora_rank) * query
    up += shape.kv_lora_rank * heads * (shape.qk_head_dim + shape.v_head_dim)
    down = shape.kv_lora_rank + shape.qk_pos_emb_head_dim + (shape.q_lora_rank or 0)
    return up + hidden * down + shape.attention_output_size * hidden, up


def executed_flops(
    flops: ForwardFlops,
    recompute: Recompute,
    chunks: Sequence[Sequence[int | bool]],
    *,
    padded: bool = True,
) -> int:
    """Operations per token that a training step really executes: what is recomputed, and the products of
    values that are padded.

    ``chunks`` are the kinds of layers (true: a mixture) of every model chunk, of which ``block``
    counts from the first. ``padded`` says that latent attention's values are padded.
    """
    padding = flops.padding if padded else 0
    last, layers = [flops.depth_kind] * flops.depths, len(chunks[-1])
    again = 0
    if recompute.granularity == "full":
        for kinds in chunks:
            again += sum(
                flops.layer(bool(kind)) + padding for kind in kinds[: recompute.recomputed_layers(len(kinds))]
            )
        again += sum(
            flops.layer(kind) + padding + flops.depth_projection
            for depth, kind in enumerate(last, start=1)
            if recompute.recomputes_depth(layers, depth)
        )
    else:
        kinds = [*flops.pattern, *last]
        if recompute.granularity == "selective":
            again += len(kinds) * (flops.layer_attention + padding)
        if recompute.mla_up_proj:
            again += len(kinds) * flops.up_projections
        if recompute.moe_layer:
            again += sum(map(bool, kinds)) * (flops.router + flops.experts + flops.shared_experts)
    return flops.training + 3 * (len(flops.pattern) + flops.depths) * padding + again


def training_flops(config: Any) -> float:
    """Operations per token of one training step of ``config`` (a ``TrainingConfig``), recomputation apart.

    What ``ModelFamily.flops`` returns. Raises ``ConfigError`` when the model is not complete or has no
    ``seq_length``.
    """
    if config.train.seq_length is None:
        raise ConfigError("seq_length is not set; give --seq-length")
    return float(forward_flops(padded_shape_of(config), int(config.train.seq_length)).training)
