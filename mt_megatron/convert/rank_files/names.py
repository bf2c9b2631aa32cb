"""One rank's state in the ``torch`` form: names of its chunk of the model to those of the whole one.

Experts of a rank are one tensor each (``SequentialMLP``; Transformer Engine's grouped linears) or lie
behind each other in two (``GroupedMLP``): transposed in Megatron-Core 0.9.0, where ``weight1`` shows as
[h, experts x 2 ffn] and is [experts, h, 2 ffn] in memory, and as [experts, 2 ffn, h] in ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from mt_megatron.models.tables.fused import fused_name, local_name

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_SEQUENTIAL = re.compile(r"(.*\.experts\.local_experts)\.(\d+)\.(.*)")
_GROUPED = re.compile(r"(.*\.experts)\.weight([12])")
_GROUPED_LINEAR = re.compile(r"(.*\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)")


@dataclass(frozen=True, kw_only=True)
class ChunkNames:
    """What the names of one chunk of one rank stand for."""

    layers: Sequence[int]
    """Its layers in the whole model."""

    experts: int
    """Experts of this rank."""

    first_expert: int
    hidden_size: int

    def whole(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the whole model (as local layers name them) that ``name`` holds parts of."""
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            name = f"decoder.layers.{self.layers[int(layer[1])]}.{layer[2]}"
        grouped, linear = _GROUPED.fullmatch(name), _GROUPED_LINEAR.fullmatch(name)
        sequential = _SEQUENTIAL.fullmatch(name)
        if grouped is not None:
            first = grouped[2] == "1"
            if tensor.dim() == 3:
                # As mt_megatron's own layers hold them: each expert like a linear's weight.
                tensor = tensor.transpose(1, 2)
            shape = (self.experts, self.hidden_size, -1) if first else (self.experts, -1, self.hidden_size)
            for expert, part in enumerate(tensor.reshape(shape).transpose(1, 2)):
                index = self.first_expert + expert
                yield f"{grouped[1]}.local_experts.{index}.linear_fc{grouped[2]}.weight", part
        elif linear is not None:
            yield f"{linear[1]}.local_experts.{self.first_expert + int(linear[3])}.{linear[2]}", tensor
        elif sequential is not None:
            index = self.first_expert + int(sequential[2])
            yield f"{sequential[1]}.{index}.{sequential[3]}", tensor
        else:
            yield local_name(name), tensor

    def local(self, name: str, *, transformer_engine: bool, grouped: bool, is_moe: bool, latent: bool) -> str:
        """The name in this chunk of the tensor ``name`` of the whole model; experts as ``SequentialMLP``'s,
        or as Transformer Engine's grouped linears name them."""
        if transformer_engine:
            name = fused_name(name, is_moe=is_moe, latent=latent)
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            name = f"decoder.layers.{self.layers.index(int(layer[1]))}.{layer[2]}"
        sequential = _SEQUENTIAL.fullmatch(name)
        if sequential is not None:
            expert = int(sequential[2]) - self.first_expert
            if transformer_engine and grouped:
                return f"{sequential[1].removesuffix('.local_experts')}.{sequential[3]}{expert}"
            return f"{sequential[1]}.{expert}.{sequential[3]}"
        return name
