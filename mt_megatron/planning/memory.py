"""Memory of one training rank in bytes, by part and by pipeline stage, from sizes alone.

What an accelerator's driver and its collective library take for themselves is not in it, nor what
the allocator loses to fragmentation; ``docs/18-plan.md`` says what to leave free for those.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate

from mt_megatron.pipeline.actions import Placement, Schedule, Style
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.simulate.memory import peaks_by_chunk
from mt_megatron.planning.activation_memory import (
    ActivationOptions,
    backward_workspace,
    chunk_bytes,
    hidden_bytes,
)
from mt_megatron.planning.linears import Casts
from mt_megatron.planning.parameter_memory import NOTHING, ParameterMemory, StateOptions, chunk_state_memory
from mt_megatron.planning.parameter_tensors import ChunkPlace, ParameterTensor, chunk_tensors
from mt_megatron.planning.parameters import ModelShape

_FP32 = 4
_INT64 = 8
_BLOCK_ON_CPU = 96 << 20
_BLOCK = 1 << 30
"""Most bytes of logits at once when output layer and loss are one (``layers.loss.cross_entropy_blocks``)."""
_PANEL_OF_LOGITS = 4 * 2048 * 192
_PANEL_OF_PRODUCT = 4 << 20
"""In fp32 on a CPU most bytes of logits, and of a weight gradient, before they go where they belong
(``layers.loss.cross_entropy``, ``seams.onednn``)."""


def loss_kept_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What one micro-batch's loss keeps for its backward pass, and those of multi-token prediction.

    Fused with the output layer: the gradient of its input, the targets, one sum and one weight per token.
    Else: the softmax of all tokens in fp32, the targets, which of them are on this rank, the weights.
    """
    losses = 1 + (shape.mtp_num_layers or 0)
    if options.fused_loss:
        return losses * (hidden_bytes(shape, options) + options.tokens * (_INT64 + 2 * _FP32))
    softmax = _FP32 * shape.vocab_size // options.tensor_parallel
    return losses * options.tokens * (softmax + _INT64 + 1 + _FP32)


def loss_workspace(
    shape: ModelShape, options: ActivationOptions, weight_gradient: int, *, narrow_buffer: bool = False
) -> int:
    """What the loss needs at its worst moment beside what it keeps; ``weight_gradient`` is the output
    layer's, in bytes. ``narrow_buffer``: gradients are accumulated in less than fp32.

    Fused: in forward one block of logits (in fp32 on a CPU a part of another product beside it), an fp32 copy
    of a narrow buffer where there are several blocks, and under sequence parallelism the input's gradient
    before it is scattered; in backward a stand-in for the weight gradient, which is in its buffer already.
    Else: in forward the logits that are no fp32, in backward their gradient and the weight gradient.
    """
    logits = options.tokens * shape.vocab_size // options.tensor_parallel
    if options.fused_loss:
        width = _FP32 if options.element_bytes == _FP32 else options.element_bytes + _FP32
        if options.on_cpu and options.element_bytes < _FP32 and options.tensor_parallel == 1:
            # Few rows at a time are widened; the weight gradient's product transposes the block.
            width = 2 * options.element_bytes
        limit = _BLOCK_ON_CPU if options.on_cpu else _BLOCK
        block = min(limit, logits * width)
        several = logits * width > limit
        if options.on_cpu and options.element_bytes == _FP32:
            # The weight gradient's product is of hidden states times their tokens' factors.
            scaled = options.tokens * shape.hidden_size * _FP32 * block // (logits * width)
            # The hidden states' gradient is made of a panel that the product lays out anew, twice.
            panels = 2 * min(block, _PANEL_OF_LOGITS)
            block += max(panels, min(weight_gradient, _PANEL_OF_PRODUCT) + scaled)
        gradient = options.tokens * shape.hidden_size * options.element_bytes
        whole = gradient - hidden_bytes(shape, options) if options.sequence_parallel else 0
        sums = _FP32 * shape.vocab_size // options.tensor_parallel * shape.hidden_size
        return max(block + whole + (sums if narrow_buffer and several else 0), weight_gradient)
    if options.element_bytes == _FP32:
        return weight_gradient
    return max(logits * options.element_bytes, weight_gradient - 2 * logits)


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """Everything that the memory of a rank depends on."""

    shape: ModelShape
    """The model, its ``vocab_size`` padded."""

    state: StateOptions
    activations: ActivationOptions
    num_microbatches: int
    """Micro-batches of one step and data-parallel rank."""

    data_parallel: int = 1
    """Copies of the model; context-parallel ranks not counted."""

    expert_parallel: int = 1
    pipeline_parallel: int = 1
    chunks: int = 1
    """Model chunks per stage: more than one under the interleaved schedule."""

    layers: tuple[int, ...] | None = None
    """Layers of each model chunk in the order that a batch takes (the stages' first chunks, then their
    second ones). None: the same number everywhere."""

    fused_weight_gradients: bool = False
    """Whether weight gradients are added up by the matrix product itself."""

    schedule: Schedule | None = None
    """Order of a step's passes, and where chunks lie. None: Megatron-Core's own."""

    casts: Casts | None = None
    """What is kept of FP8 weights; None without a recipe."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes at the moment of a step when a rank holds most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What the micro-batches in flight keep for their backward pass."""

    workspace: int
    """The largest set of tensors that live only for a moment: a layer computed again, logits, the
    gradient of the largest weight."""

    communication: int
    """Buffers of tensor-parallel gathers and of sends between stages."""

    casts: int
    """FP8 weights as codes and scales, kept for all micro-batches of a step."""

    stage: int
    """The pipeline stage that this is about."""

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(getattr(self, name) for name in PARTS)

    def as_dict(self) -> dict[str, int]:
        """``total`` first, then the parts and ``pipeline_stage``."""
        return {
            "total": self.total,
            **{name: getattr(self, name) for name in PARTS},
            "pipeline_stage": self.stage,
        }


PARTS = tuple(field.name for field in fields(RankMemory) if field.name != "stage")
"""Names of the parts."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """One entry for each pipeline stage."""

    stages: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total)


def worst_memory(case: MemoryCase) -> RankMemory:
    """``estimate_memory(case).worst``, from the stages that it can be.

    Of stages with the same kinds of layers the first has most micro-batches in flight under Megatron-Core's
    own schedules.
    """
    stages = list(range(case.pipeline_parallel))
    if case.schedule is None:
        placed = _places(case.shape, chunk_layers(case), placement_of(case))
        stages = sorted({tuple(placed[stage]): stage for stage in reversed(stages)}.values())
    return max((_stage(case, stage) for stage in stages), key=lambda each: each.total)


def estimate_memory(case: MemoryCase) -> MemoryEstimate:
    """Bytes of the rank that holds most, for each pipeline stage. Sizes must divide: validate first."""
    return MemoryEstimate(stages=tuple(_stage(case, stage) for stage in range(case.pipeline_parallel)))


def chunk_layers(case: MemoryCase) -> tuple[int, ...]:
    """Layers of each model chunk in the order that a batch takes."""
    if case.layers is not None:
        return case.layers
    total = case.pipeline_parallel * case.chunks
    return (case.shape.num_layers // total,) * total


def stage_layers(case: MemoryCase) -> list[int]:
    """Transformer layers of each stage."""
    return [sum(place.layers for place in places(case, stage)) for stage in range(case.pipeline_parallel)]


def placement_of(case: MemoryCase) -> Placement:
    """Where the model chunks lie that a batch takes one after another."""
    style = Style.LOOP if case.schedule is None else case.schedule.placement.style
    return Placement(case.pipeline_parallel, case.chunks, style)


def places(case: MemoryCase, stage: int) -> list[ChunkPlace]:
    """The chunks of one stage in their order."""
    return list(_places(case.shape, chunk_layers(case), placement_of(case))[stage])


@lru_cache(maxsize=4096)
def _places(shape: ModelShape, counts: tuple[int, ...], placement: Placement) -> list[list[ChunkPlace]]:
    found: list[list[ChunkPlace]] = [[] for _ in range(placement.ranks)]
    pattern, start = shape.pattern, 0
    for index, count in enumerate(counts):
        found[placement.rank(index)].append(
            ChunkPlace(
                layers=count,
                first=index == 0,
                last=index == len(counts) - 1,
                mixtures=pattern[start : start + count],
            )
        )
        start += count
    return found


def state_memory(
    case: MemoryCase, stage: int, rank: int | None = None, *, experts: bool | None = None
) -> ParameterMemory:
    """Weights, gradients and optimizer state of data-parallel rank ``rank`` (with context-parallel ones
    counted in, as Megatron-Core's group with both), or of the one that has most.

    ``experts`` leaves only the parameters that expert-parallel ranks do not share (True), or only the
    others (False).
    """
    context, total = case.activations.context_parallel, NOTHING
    # Expert-parallel ranks are neighbours among the data-parallel ones.
    apart = None if rank is None else rank // context // case.expert_parallel * context + rank % context
    for index, place in enumerate(places(case, stage)):
        total += _chunk_state(
            case.shape,
            place,
            case.activations.tensor_parallel,
            case.expert_parallel,
            case.state,
            case.data_parallel * context,
            # Upstream divides gradients into buckets where their reduction can hide nowhere else.
            stage == 0 and index == 0,
            (rank, apart),
            experts,
        )
    return total


@lru_cache(maxsize=4096)
def _tensors(shape: ModelShape, place: ChunkPlace, tp: int, ep: int) -> tuple[ParameterTensor, ...]:
    return tuple(chunk_tensors(shape, place, tensor_parallel=tp, expert_parallel=ep))


@lru_cache(maxsize=1024)
def _largest_of_a_layer(shape: ModelShape, tp: int, ep: int, kinds: frozenset[int]) -> int:
    place = ChunkPlace(layers=len(kinds), first=False, last=False, mixtures=tuple(kinds))
    return max((tensor.numel for tensor in _tensors(shape, place, tp, ep)), default=0)


@lru_cache(maxsize=16384)
def _chunk_state(
    shape: ModelShape,
    place: ChunkPlace,
    tp: int,
    ep: int,
    state: StateOptions,
    ranks: int,
    bucketed: bool,
    rank: tuple[int | None, int | None],
    experts: bool | None,
) -> ParameterMemory:
    tensors = _tensors(shape, place, tp, ep)
    return chunk_state_memory(
        [tensor for tensor in tensors if experts is None or tensor.expert is experts],
        state,
        data_parallel=ranks,
        expert_data_parallel=ranks // ep,
        bucketed=bucketed,
        rank=rank[0],
        expert_rank=rank[1],
    )


def _stage(case: MemoryCase, stage: int) -> RankMemory:
    state, chunks = state_memory(case, stage), places(case, stage)
    # Most chunks of a stage are alike: each kind is computed once.
    kinds = dict.fromkeys(chunks)
    sizes = {place: kept_bytes(case, place) for place in kinds}
    kept = [sizes[place] for place in chunks]
    activations = max(
        sum(count * size for count, size in zip(counts, kept, strict=True))
        for counts in in_flight(case, stage)
    )
    workspace = max(_workspace(case, place) for place in kinds)
    if case.state.gradient_bytes < 4:
        # The optimizer makes fp32 copies of narrower gradients, when no activation is left.
        copies = state.gradients // case.state.gradient_bytes * 4
        workspace = max(workspace, copies - activations)
    return RankMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations,
        workspace=workspace,
        communication=_communication(case),
        casts=_casts(case, stage),
        stage=stage,
    )


def kept_bytes(case: MemoryCase, place: ChunkPlace) -> int:
    """What one micro-batch leaves behind for the backward pass of a model chunk."""
    kept = chunk_bytes(case.shape, place, case.activations)
    return kept + (loss_kept_bytes(case.shape, case.activations) if place.last else 0)


def _workspace(case: MemoryCase, place: ChunkPlace) -> int:
    shape, tp = case.shape, case.activations.tensor_parallel
    width = 0 if case.fused_weight_gradients else case.state.parameter_bytes
    vocabulary = shape.vocab_size // tp * shape.hidden_size
    kinds = frozenset(place.mixtures or (0,))
    layer = _largest_of_a_layer(shape, tp, case.expert_parallel, kinds) * width
    backward = backward_workspace(shape, place, case.activations, layer)
    if not place.last:
        return max(backward, vocabulary * width if place.first else 0)
    # By the time the layers' turn comes, the loss has dropped what it kept.
    return max(
        loss_workspace(
            shape, case.activations, vocabulary * width, narrow_buffer=case.state.gradient_bytes < _FP32
        ),
        backward - loss_kept_bytes(shape, case.activations),
    )


def _casts(case: MemoryCase, stage: int) -> int:
    if case.casts is None:
        return 0
    counts, shape = chunk_layers(case), case.shape
    ends = list(accumulate(counts))
    own = placement_of(case).stages_of(stage)
    layers = [layer for index in own for layer in range(ends[index] - counts[index] + 1, ends[index] + 1)]
    last = len(counts) - 1 in own
    if last:
        layers += range(ends[-1] + 1, ends[-1] + 1 + (shape.mtp_num_layers or 0))
    return case.casts.of(
        shape,
        layers,
        last=last,
        tensor_parallel=case.activations.tensor_parallel,
        experts=(shape.num_moe_experts or 0) // case.expert_parallel,
    )


def _communication(case: MemoryCase) -> int:
    options, total = case.activations, 0
    if options.sequence_parallel:
        # Megatron-Core's shared buffer that every gather of a layer's input goes to.
        total += options.tokens * case.shape.hidden_size * options.element_bytes
    if case.pipeline_parallel > 1:
        # A received gradient and one to send; received activations are counted as kept.
        total += 2 * hidden_bytes(case.shape, options)
    return total


def in_flight(case: MemoryCase, stage: int) -> tuple[tuple[int, ...], ...]:
    """For each chunk how many micro-batches are kept, at every moment when it may be most.

    Upstream: ``forward_backward_pipelining_without_interleaving`` and ``_with_interleaving``. Under another
    schedule a micro-batch is kept from its F to its B, or to its W, whose linears have kept their inputs.
    """
    if case.schedule is not None:
        return _in_flight_of(case.schedule)[stage]
    return _in_flight(case.pipeline_parallel, case.chunks, case.num_microbatches, stage)


@lru_cache(maxsize=4096)
def _in_flight(stages: int, chunks: int, batches: int, stage: int) -> tuple[tuple[int, ...], ...]:
    if chunks == 1:
        return ((min(batches, stages - stage),),)
    # Megatron-Core refuses other numbers than multiples of the stages; the next one is counted for them.
    whole = batches + -batches % stages
    return _all_in_flight(stages, chunks, min(whole, 4 * stages))[stage]


@lru_cache(maxsize=256)
def _all_in_flight(stages: int, chunks: int, batches: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    # The pattern repeats with every group of one micro-batch per stage, here after two such groups.
    return peaks_by_chunk(generate("interleaved", ranks=stages, chunks=chunks, microbatches=batches))


@lru_cache(maxsize=256)
def _in_flight_of(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return peaks_by_chunk(schedule)
