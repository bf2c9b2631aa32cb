"""The linears of a decoder's layers by name, with their sizes, operations and casts, without building
anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mt_megatron.planning.parameters import ModelShape


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One linear of one layer, or the experts of a layer together."""

    layer: int
    """From 1; depths of multi-token prediction follow the last layer."""

    name: str
    """Within the layer, as Megatron-Core calls it."""

    inputs: int
    outputs: int

    split: Literal["outputs", "inputs", "no"]
    """What tensor parallelism divides."""

    uses: int = 1
    """How many of its kind (experts) one token passes."""

    @property
    def flops(self) -> int:
        """Of one token's forward pass."""
        return 2 * self.inputs * self.outputs * self.uses

    def on_rank(self, tensor_parallel: int) -> tuple[int, int]:
        """Inputs and outputs that one rank has."""
        inputs = self.inputs // tensor_parallel if self.split == "inputs" else self.inputs
        outputs = self.outputs // tensor_parallel if self.split == "outputs" else self.outputs
        return inputs, outputs


@dataclass(frozen=True, kw_only=True)
class Casts:
    """Cast weights that a rank keeps during a step."""

    bytes_per_weight: float
    """Codes and scales in all layouts that are kept, and what they were decoded to."""

    layers: frozenset[int]
    """Layers whose linears are cast, from 1."""

    output_layer: bool = False

    def of(
        self, shape: ModelShape, layers: Iterable[int], *, last: bool, tensor_parallel: int, experts: int
    ) -> int:
        """Bytes for these ``layers`` of a rank that has ``experts`` of each mixture; ``last``: it has the
        output layer."""
        wanted, weights = self.layers.intersection(layers), 0
        for each in linears(shape):
            if each.layer in wanted:
                inputs, outputs = each.on_rank(tensor_parallel)
                weights += inputs * outputs * (experts if ".experts." in each.name else 1)
        if last and self.output_layer:
            weights += shape.hidden_size * shape.vocab_size // tensor_parallel
        return round(weights * self.bytes_per_weight)


@lru_cache(maxsize=256)
def linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Of all layers in order, and of the depths' layers after them."""
    pattern = list(shape.pattern)
    pattern += pattern[-1:] * (shape.mtp_num_layers or 0)
    return tuple(
        each for number, mixture in enumerate(pattern, start=1) for each in _layer(shape, number, mixture)
    )


def _layer(shape: ModelShape, number: int, mixture: int) -> Iterator[Linear]:
    hidden = shape.hidden_size

    def made(
        name: str, inputs: int, outputs: int, split: Literal["outputs", "inputs", "no"], uses: int = 1
    ) -> Linear:
        return Linear(layer=number, name=name, inputs=inputs, outputs=outputs, split=split, uses=uses)

    attention = "self_attention"
    if shape.multi_latent_attention:
        if shape.q_lora_rank is None:
            yield made(f"{attention}.linear_q_proj", hidden, shape.query_size, "outputs")
        else:
            yield made(f"{attention}.linear_q_down_proj", hidden, shape.q_lora_rank, "no")
            yield made(f"{attention}.linear_q_up_proj", shape.q_lora_rank, shape.query_size, "outputs")
        down = shape.kv_lora_rank + shape.qk_pos_emb_head_dim
        yield made(f"{attention}.linear_kv_down_proj", hidden, down, "no")
        up = shape.num_attention_heads * (shape.qk_head_dim + shape.v_head_dim)
        yield made(f"{attention}.linear_kv_up_proj", shape.kv_lora_rank, up, "outputs")
    else:
        qkv = shape.query_size + 2 * shape.num_query_groups * shape.kv_channels
        yield made(f"{attention}.linear_qkv", hidden, qkv, "outputs")
    yield made(f"{attention}.linear_proj", shape.attention_output_size, hidden, "inputs")
    gates = 2 if shape.gated_linear_unit else 1
    if not mixture:
        yield made("mlp.linear_fc1", hidden, gates * shape.ffn_hidden_size, "outputs")
        yield made("mlp.linear_fc2", shape.ffn_hidden_size, hidden, "inputs")
        return
    used = min(shape.moe_router_topk, shape.num_moe_experts or 0)
    yield made("mlp.experts.linear_fc1", hidden, gates * shape.expert_size, "outputs", used)
    yield made("mlp.experts.linear_fc2", shape.expert_size, hidden, "inputs", used)
    if shape.moe_shared_expert_intermediate_size is not None:
        shared = shape.moe_shared_expert_intermediate_size
        yield made("mlp.shared_experts.linear_fc1", hidden, gates * shared, "outputs")
        yield made("mlp.shared_experts.linear_fc2", shared, hidden, "inputs")
