"""Multi-token prediction after DeepSeek-V3: the modules that predict tokens beyond the next one.

arXiv:2412.19437, section 2.2. Depth k of D combines what depth k - 1 knows at position i (depth 0 is the
model itself, after its final norm) with the embedding of token i + k, and predicts token i + k + 1 with
the model's own output layer. Names are Megatron-Core 0.12's: ``mtp.layers.{k - 1}.{enorm, hnorm, eh_proj,
transformer_layer, final_layernorm}``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

_KEPT = 1024
"""Micro-batches whose sums wait on the device; some devices cannot add them up as exactly as the host."""


@dataclass(kw_only=True)
class MultiTokenPredictionLayerSubmodules:
    """What one depth is built of: classes or ``ModuleSpec``."""

    enorm: Any
    """Norm of the embedding."""

    hnorm: Any
    """Norm of the hidden states."""

    eh_proj: Any
    """Column-parallel linear from both, 2h, to h."""

    transformer_layer: Any
    """A transformer layer."""

    layer_norm: Any
    """Norm before the output layer."""


@dataclass(kw_only=True)
class MultiTokenPredictionBlockSubmodules:
    """The depths of a block."""

    layer_specs: list[Any]
    """One ``ModuleSpec`` for each depth."""


class MultiTokenPredictionLayer(MegatronModule):  # type: ignore[misc]
    """One depth: ``layer(eh_proj(cat(enorm(embedding), hnorm(hidden))))`` and a norm.

    ``layer_number`` is its depth, from 1 on. Its transformer layer is numbered on from the model's own.
    """

    def __init__(
        self, config: Any, submodules: MultiTokenPredictionLayerSubmodules, layer_number: int = 1
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        decoder_layers = get_num_layers_to_build(config)
        self._recomputed = _is_recomputed(config, decoder_layers + layer_number)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = build_module(submodules.enorm, **norm)
        self.hnorm = build_module(submodules.hnorm, **norm)
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )
        self.transformer_layer = build_module(
            submodules.transformer_layer, config=config, layer_number=decoder_layers + layer_number
        )
        self.final_layernorm = build_module(submodules.layer_norm, **norm)

    def forward(self, embedding: Tensor, hidden_states: Tensor, **attention: Any) -> Tensor:
        """``embedding`` of token i + k and ``hidden_states`` of depth k - 1, both [s, b, h] (this rank's
        [s / tp, b, h] under sequence parallelism); returns depth k's, alike.

        ``attention`` goes to the transformer layer: ``attention_mask``, ``rotary_pos_emb`` and so on.
        """

        def run(embedding: Tensor, hidden_states: Tensor) -> Tensor:
            return self._forward(embedding, hidden_states, attention)

        if not self._recomputed or not self.training:
            return run(embedding, hidden_states)
        # Never distributed over tensor-parallel ranks: that would cut up the output layer's input.
        output: Tensor = tensor_parallel.checkpoint(run, False, embedding, hidden_states)
        return output

    def _forward(self, embedding: Tensor, hidden_states: Tensor, attention: dict[str, Any]) -> Tensor:
        parallel = self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if parallel else nullcontext():
            both = torch.cat((self.enorm(embedding), self.hnorm(hidden_states)), dim=-1)
            projected, _ = self.eh_proj(both)
            # Not the all-gather of the same module: its backward would sum what is equal on every rank.
            hidden = tensor_parallel.gather_from_tensor_model_parallel_region(projected)
            if parallel:
                hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
            if self.config.fp32_residual_connection:
                hidden = hidden.float()
            hidden, _ = self.transformer_layer(hidden_states=hidden, **attention)
        output: Tensor = make_viewless_tensor(
            inp=self.final_layernorm(hidden), requires_grad=True, keep_graph=True
        )
        return output


def _is_recomputed(config: Any, number: int) -> bool:
    """Whether full recomputation covers layer ``number`` of this stage, from 1 on; depths come last."""
    if config.recompute_granularity != "full":
        return False
    return bool(config.recompute_method == "uniform" or number <= config.recompute_num_layers)


class MultiTokenPredictionBlock(MegatronModule):  # type: ignore[misc]
    """All depths, on the last pipeline stage.

    ``spec`` is a ``MultiTokenPredictionBlockSubmodules`` or a ``ModuleSpec`` that has one.
    """

    def __init__(self, config: Any, spec: Any) -> None:
        super().__init__(config=config)
        self.submodules: MultiTokenPredictionBlockSubmodules = getattr(spec, "submodules", spec)
        self.layers = torch.nn.ModuleList(
            build_module(layer, config=config, layer_number=depth)
            for depth, layer in enumerate(self.submodules.layer_specs, start=1)
        )
        self._reported: list[Tensor] = []
        self._total: Tensor | None = None
        self.has_seen_labels = False
        """Labels that stand for tokens were looked at once; see ``model.forward``."""

    def forward(self, depth: int, embedding: Tensor, hidden_states: Tensor, **attention: Any) -> Tensor:
        """Depth ``depth``, from 1 on; see ``MultiTokenPredictionLayer.forward``."""
        output: Tensor = self.layers[depth - 1](embedding, hidden_states, **attention)
        return output

    def report(self, sums: Tensor) -> None:
        """Add the depths' sums of losses and of counted tokens, [D, 2] of any float type, of one
        micro-batch."""
        self._reported.append(sums)
        if len(self._reported) >= _KEPT:
            # A script that never asks would fill the device's memory.
            self._total = self._summed()

    def take_reported(self) -> Tensor | None:
        """The sum of what was reported since the last call, float64 [D, 2] on the host; None when
        nothing was."""
        total, self._total = self._summed(), None
        return total

    def _summed(self) -> Tensor | None:
        """The total so far and what was kept since; waits for the device."""
        reported, self._reported = self._reported, []
        total = self._total
        if not reported:
            return total
        if total is None:
            total = torch.zeros(reported[0].shape, dtype=torch.float64)
        for sums in torch.stack(reported).cpu().double():
            total += sums
        return total

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The depths' tensors by name: they are not stacked with the model's layers."""
        found: ShardedStateDict = {}
        layers: list[Any] = list(self.layers)
        for index, layer in enumerate(layers):
            found.update(layer.sharded_state_dict(f"{prefix}layers.{index}.", sharded_offsets, metadata))
        return found
