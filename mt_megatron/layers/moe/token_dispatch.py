"""Tokens to their experts and back, for both of Megatron-Core's dropless dispatchers.

Where every choice of a token is computed here (one rank, or all tokens gathered) the dispatcher may hand
the routing over to the experts, which gather, weigh and sum the rows themselves while an expert's rows are
in cache. Otherwise rows are moved here and weighed on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mt_megatron.errors import MtMegatronError
from mt_megatron.layers.moe.permutation import Routing, route


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What experts need that get every token once, and not grouped."""

    routing: Routing
    probs: Tensor
    """[tokens, topk], differentiable."""


class Dispatch:
    """What a patched dispatcher remembers between its two halves; one per dispatcher object."""

    def __init__(self) -> None:
        # Weak, since the layer holds the dispatcher: it would be freed by the collector alone.
        self._layer: ref[Any] | None = None
        self._experts: ref[Any] | None = None
        self._handed_over = False
        self.handover: Handover | None = None
        self.routing: Routing | None = None
        self.probs: Tensor | None = None
        self.shape = torch.Size()

    def connect(self, layer: Any) -> None:
        """Hand over to the experts that ``layer`` has now, for as long as it has them."""
        self._layer, self._experts = ref(layer), ref(layer.experts)

    @property
    def into_experts(self) -> bool:
        """Experts behind this dispatcher take a ``Handover``; others that were put in their place get rows,
        as does the copy of a layer."""
        layer = None if self._layer is None else self._layer()
        if layer is None or self._experts is None:
            return False
        connected: bool = layer.experts is self._experts() and of(layer.token_dispatcher) is self
        return connected

    def begin(self, hidden: Tensor, probs: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """What ``token_permutation`` returns for all tokens [t, h]."""
        self._handed_over = self.into_experts
        if self._handed_over:
            self.handover = Handover(routing=routing, probs=probs)
            return hidden, _counts(routing)
        self.routing, self.probs = routing, probs
        return routing.take(hidden), _counts(routing).cpu()

    def end(self, rows: Tensor) -> Tensor:
        """Every token once, from what the experts returned."""
        if self._handed_over:
            if self.handover is not None:
                raise MtMegatronError(
                    "the experts of an MoE layer did not take the routing that its dispatcher handed over; "
                    "expected GroupedMLP's own forward, which was replaced on the object. Put other experts "
                    "in their place (layer.experts = ...), which get each expert's rows"
                )
            return rows
        assert self.routing is not None
        return self.routing.combine(rows, self.probs)

    def take(self) -> Handover | None:
        """For the experts: what was handed over, once."""
        handover, self.handover = self.handover, None
        return handover

    def forget(self) -> None:
        """Let go of the micro-batch's tensors."""
        self.routing = self.probs = None


def of(dispatcher: Any) -> Dispatch:
    """The ``Dispatch`` of ``dispatcher``."""
    found: Dispatch | None = vars(dispatcher).get("_mt_dispatch")
    if found is None:
        found = dispatcher._mt_dispatch = Dispatch()
    return found


def connect(layer: Any) -> None:
    """Let an MoE layer's dispatcher leave the gathering to its experts where both are known to agree.

    A subclass of ``MoELayer`` may do something with the rows between the two: it gets them as upstream's.
    """
    from megatron.core.transformer.moe.experts import GroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
    )

    experts, dispatcher = layer.experts, layer.token_dispatcher
    kind = type(dispatcher)
    if type(layer) is not MoELayer or type(experts) is not GroupedMLP:
        return
    if experts.weight1.dim() != 3:  # upstream's order, for a forward in the place of ours
        return
    if layer.config.moe_pad_expert_input_to_capacity:
        return
    if kind is MoEAllGatherTokenDispatcher or (
        kind is MoEAlltoAllTokenDispatcher and not spans_ranks(layer.config)
    ):
        of(dispatcher).connect(layer)
        experts.token_dispatcher = dispatcher


def _counts(routing: Routing) -> Tensor:
    ends = routing.groups.ends.long()
    return torch.diff(ends, prepend=ends.new_zeros(1))


def spans_ranks(config: Any) -> bool:
    """Whether experts are spread over several ranks, or each over several."""
    return bool(config.tensor_model_parallel_size * config.expert_model_parallel_size > 1)


def gather_permutation(
    dispatcher: Any, hidden: Tensor, probs: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """``MoEAllGatherTokenDispatcher.token_permutation``: every rank of the tensor x expert group sees all
    tokens and keeps the choices of its own experts.

    All ranks of the group must bring equally many tokens. How many choices are this rank's is read from
    the device once, where experts are spread over ranks.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region_to_moe as gather

    dispatch = of(dispatcher)
    dispatch.shape = hidden.shape
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if spans_ranks(dispatcher.config):
        with torch.no_grad():
            indices = gather(indices)
        # Not into the shared buffer, which a layer's backward would still be reading.
        probs, hidden = gather(probs), gather(hidden)
    everything = dispatcher.num_local_experts == dispatcher.config.num_moe_experts
    first = dispatcher.local_expert_indices[0]
    routing = route(indices, first, dispatcher.num_local_experts, all_local=everything)
    return dispatch.begin(hidden, probs, routing)


def gather_unpermutation(dispatcher: Any, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``MoEAllGatherTokenDispatcher.token_unpermutation``: partial sums of all ranks, each rank's tokens."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        reduce_scatter_to_sequence_parallel_region_from_moe as reduce_scatter,
    )

    dispatch = of(dispatcher)
    output = dispatch.end(rows)
    output_bias = None
    if dispatcher.add_bias:
        assert bias is not None
        output_bias = dispatch.end(bias)
    if spans_ranks(dispatcher.config):
        output = reduce_scatter(output)
        if output_bias is not None:
            # Every tensor parallel rank has the whole bias.
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            output_bias = reduce_scatter(output_bias) / ranks
    dispatch.forget()
    return output.view(dispatch.shape), None if output_bias is None else output_bias.view(dispatch.shape)


def stays_local(dispatcher: Any) -> bool:
    """Whether the alltoall dispatcher has no other rank to send to and leaves the tokens to the experts."""
    return of(dispatcher).into_experts


def local_permutation(
    dispatcher: Any, hidden: Tensor, probs: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """``token_permutation`` where ``stays_local``; reads from the device only if tokens are dropped."""
    dispatch = of(dispatcher)
    dispatch.shape = hidden.shape
    dropless = dispatcher.config.moe_expert_capacity_factor is None
    routing = route(indices, 0, dispatcher.num_local_experts, all_local=dropless)
    return dispatch.begin(hidden.reshape(-1, hidden.shape[-1]), probs, routing)


def local_unpermutation(dispatcher: Any, rows: Tensor) -> tuple[Tensor, None]:
    """``token_unpermutation`` where ``stays_local``."""
    dispatch = of(dispatcher)
    return dispatch.end(rows).view(dispatch.shape), None


def local_counts(dispatcher: Any, indices: Tensor) -> Tensor:
    """``preprocess`` of the alltoall dispatcher on one rank without a capacity: the rows of each expert,
    int64 [experts] on the host, and nothing to split."""
    counts = torch.bincount(indices.reshape(-1).cpu(), minlength=dispatcher.num_experts)
    dispatcher.num_global_tokens_per_local_expert_cpu = counts.view(1, -1)
    dispatcher.cuda_sync_point = "no_sync"
    return counts
