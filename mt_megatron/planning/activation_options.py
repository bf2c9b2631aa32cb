"""Options that the memory of activations depends on beside the model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Parts that are computed again in the backward pass; the values are Megatron-Core's."""

    granularity: Literal["selective", "full"] | None = None
    """None: nothing; ``selective``: core attention; ``full``: layers."""

    method: Literal["uniform", "block"] | None = None
    """``uniform``: all layers, ``num_layers`` at a time; ``block``: the first ``num_layers`` of a chunk."""

    num_layers: int = 1
    """See ``method``."""

    distribute: bool = False
    """Whether what full recomputation keeps is spread over the tensor-parallel ranks."""

    mla_up_proj: bool = False
    """Whether the up-projections of latent attention are computed again (``recompute_mla_up_proj``)."""

    moe_layer: bool = False
    """Whether mixtures of experts are computed again (``moe_layer_recompute``)."""

    def recomputed_layers(self, layers: int) -> int:
        """How many of a chunk's ``layers`` run forward twice."""
        if self.granularity != "full":
            return 0
        return layers if self.method == "uniform" else min(self.num_layers, layers)

    def recomputes_depth(self, layers: int, depth: int) -> bool:
        """Whether depth ``depth`` (from 1) of multi-token prediction runs forward twice, in a chunk of
        ``layers``: its layer is numbered on from theirs."""
        if self.granularity != "full":
            return False
        return self.method == "uniform" or layers + depth <= self.num_layers


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Options that decide how much one micro-batch keeps."""

    sequence: int
    """Tokens of a whole sequence."""

    micro_batch: int
    """Sequences of a micro-batch."""

    element_bytes: int
    """Bytes of one activation: 2 for bf16 and fp16, 4 for fp32."""

    tensor_parallel: int = 1
    context_parallel: int = 1
    exchange: str = "all_gather"
    """``cp_comm_type``: how keys and values travel between context-parallel ranks."""

    sequence_parallel: bool = False
    recompute: Recompute = Recompute()
    fused_activation: bool = False
    """Whether the activation function keeps its input alone (``bias_activation_fusion``)."""

    hidden_dropout: bool = False
    """Whether dropout keeps masks."""

    window: bool = False
    """A window limits what attention sees of the sequence (``window_size``)."""

    documents_mask: bool = False
    """A mask of the whole sequence keeps documents apart (``reset_attention_mask``, not packed) or padding
    away (bert)."""

    attention_dropout: bool = False
    """Attention drops weights."""

    fused_loss: bool = True
    """Whether output layer and loss are one (``cross_entropy_loss_fusion``)."""

    on_cpu: bool = False
    """Whether dropout masks are as wide as activations, and blocks of logits small."""

    rotary_share: float = 1.0
    """``rotary_percent`` for rotary positions, else 0."""

    deallocate_outputs: bool = True
    """Whether a stage drops its output once it is sent (``deallocate_pipeline_outputs``)."""

    expert_parallel: int = 1
    expert_dispatcher: str = "alltoall"
    """``moe_token_dispatcher_type``."""

    expert_imbalance: float = 1.0
    """Tokens that the experts of the busiest expert-parallel rank receive, over their mean."""

    expert_capacity_factor: float | None = None
    """``moe_expert_capacity_factor``: no expert takes more than its share times this."""

    pad_to_capacity: bool = False
    """Whether every expert's input is padded to its capacity."""

    router_bytes: int | None = None
    """Bytes of one of the router's numbers (``moe_router_dtype``); None: those of an activation."""

    aux_loss: bool = False
    """Whether the router's probabilities of all experts are kept for a balancing loss."""

    @property
    def experts_span_ranks(self) -> bool:
        """Whether tokens travel to their experts."""
        return self.expert_parallel * self.tensor_parallel > 1

    @property
    def expert_rows(self) -> float:
        """Rows that the experts of one rank compute for each token and choice, on the busiest rank."""
        rows = self.expert_imbalance if self.expert_parallel > 1 else 1.0
        if self.expert_capacity_factor is None:
            return rows
        return self.expert_capacity_factor if self.pad_to_capacity else min(rows, self.expert_capacity_factor)

    @property
    def mask_bytes(self) -> int:
        """Bytes of one entry of a dropout mask."""
        return self.element_bytes if self.on_cpu else 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a rank holds where the sequence is divided by context alone."""
        return self.micro_batch * self.sequence // self.context_parallel

    @property
    def norm_tokens(self) -> int:
        """The same in the parts that sequence parallelism divides further."""
        return self.tokens // (self.tensor_parallel if self.sequence_parallel else 1)
