"""Estimated time of one training step by part: a stated cost model for ranking layouts, not a measurement.

Each part is work divided by a rate of ``Hardware``:

* matrix products and attention by the device's peak times the efficiency assumed for them, recomputed
  layers once more; everything else of a layer by the bytes it moves;
* tensor- and context-parallel collectives as rings over the slowest link they cross, half of those of
  the backward pass hidden behind matrix products; tokens that travel to their experts and back as
  exchanges over the slowest link of the expert-parallel group, none of them hidden;
* the pipeline's bubble, the time in which the slowest stage waits: a simulated step of 1F1B or its
  interleaved form with the times of every stage and chunk; (p - 1) / v micro-batches where all are alike
  (arXiv 2104.04473, section 2.2);
* gradients and weights over the data-parallel ranks, less what hides behind one micro-batch;
* the optimizer by the bytes of its state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from mt_megatron.pipeline.actions import Placement
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.simulate.costs import Costs
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.planning.activation_memory import exchanged_width, hidden_bytes, layer_bytes
from mt_megatron.planning.balance import balanced_layout
from mt_megatron.planning.expert_memory import expert_rows
from mt_megatron.planning.flops import ForwardFlops, forward_flops
from mt_megatron.planning.hardware import Hardware
from mt_megatron.planning.memory import MemoryCase, RankMemory, places, state_memory
from mt_megatron.planning.parameter_memory import ParameterMemory
from mt_megatron.planning.parameter_tensors import ChunkPlace

__all__ = ["StepCost", "balanced_layout", "step_cost"]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of one optimizer step on its critical path."""

    compute: float
    """Forward and backward passes, without what is computed twice."""

    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    """Tokens on their way to their experts and back."""

    pipeline: float
    """Transfers between stages."""

    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def as_dict(self) -> dict[str, float]:
        """``total`` first, then the parts."""
        return {"total": self.total, **{field.name: getattr(self, field.name) for field in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Seconds of one micro-batch on one pipeline rank."""

    chunks: tuple[float, ...]
    """Forward and backward of each chunk, without what is computed twice."""

    weights: tuple[float, ...]
    """The part of each chunk's that the products of its weight gradients take."""

    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline: float

    @property
    def compute(self) -> float:
        return sum(self.chunks)

    @property
    def total(self) -> float:
        parts = self.tensor_parallel + self.context_parallel + self.expert_parallel + self.pipeline
        return self.compute + self.recompute + parts


def step_cost(case: MemoryCase, memory: RankMemory, hardware: Hardware) -> StepCost:
    """Estimated seconds of one step. ``memory`` is that of the rank that holds most."""
    times = stage_times(case, hardware)
    stage = max(range(len(times)), key=lambda each: times[each].total)
    batches, slowest = case.num_microbatches, times[stage]
    return StepCost(
        compute=batches * slowest.compute,
        recompute=batches * slowest.recompute,
        tensor_parallel=batches * slowest.tensor_parallel,
        context_parallel=batches * slowest.context_parallel,
        expert_parallel=batches * slowest.expert_parallel,
        pipeline=batches * slowest.pipeline,
        bubble=_bubble(times, batches),
        data_parallel=_data_parallel(case, stage, hardware, slowest.total),
        optimizer=_optimizer(memory, hardware),
    )


def stage_times(case: MemoryCase, hardware: Hardware) -> list[StageTime]:
    """Of each pipeline rank."""
    flops = forward_flops(case.shape, case.activations.sequence)
    alike: dict[tuple[ChunkPlace, ...], StageTime] = {}
    times = []
    for stage in range(case.pipeline_parallel):
        key = tuple(places(case, stage))
        if key not in alike:
            alike[key] = _stage_time(case, flops, hardware, stage)
        times.append(alike[key])
    return times


def _stage_time(case: MemoryCase, flops: ForwardFlops, hardware: Hardware, stage: int) -> StageTime:
    own, kinds = places(case, stage), _kinds(case, stage)
    return StageTime(
        chunks=tuple(_chunk_compute(case, flops, hardware, place) for place in own),
        weights=tuple(_weight_gradients(case, flops, hardware, place) for place in own),
        recompute=_recompute(case, flops, hardware, stage),
        tensor_parallel=len(kinds) * _tensor_parallel(case, hardware),
        context_parallel=len(kinds) * _context_parallel(case, hardware),
        expert_parallel=sum(kinds) * _exchange(case, hardware, 4),
        pipeline=_transfer(case, hardware),
    )


def _bubble(times: list[StageTime], batches: int) -> float:
    """Seconds in which the slowest rank waits for others."""
    ranks, chunks = len(times), len(times[0].chunks)
    if ranks == 1:
        return 0.0
    # Both schedules that are simulated here place chunks in loops.
    forwards, backwards = passes(times, Placement(ranks, chunks))
    costs = Costs(forward=forwards, backward=backwards)
    slowest = max(time.total for time in times)

    def bubble(count: int) -> float:
        return _program(ranks, chunks, count).makespan(costs) - count * slowest

    # Groups of as many micro-batches as ranks soon wait as long as the group before.
    few, more = 2 * ranks, 3 * ranks
    if batches <= more:
        return bubble(batches)
    most = bubble(more)
    return most + (most - bubble(few)) / ranks * (batches - more)


def passes(
    times: list[StageTime], placement: Placement, *, transfers: bool = True
) -> tuple[list[float], list[float]]:
    """Seconds of the forward and of the backward of each model chunk, in the order that a batch takes: what a
    rank does besides is spread over its chunks as their operations are; ``transfers`` between stages too, or
    they are left out."""
    forwards, backwards = [], []
    for index in range(placement.stages):
        time = times[placement.rank(index)]
        share = time.chunks[placement.chunk(index)] / time.compute
        total = time.total - (0.0 if transfers else time.pipeline)
        once = (total - time.recompute) / 3
        forwards.append(share * once)
        backwards.append(share * (total - once))
    return forwards, backwards


@lru_cache(maxsize=256)
def _program(ranks: int, chunks: int, batches: int) -> Program:
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = generate(name, ranks=ranks, chunks=chunks, microbatches=batches)
    return Program(schedule, links=False)


def _kinds(case: MemoryCase, stage: int) -> list[bool]:
    """For each layer of a stage whether it is a mixture; those of multi-token prediction come last."""
    return [kind for place in places(case, stage) for kind in _chunk_kinds(case, place)]


def _chunk_kinds(case: MemoryCase, place: ChunkPlace) -> list[bool]:
    return [*place.kinds(case.shape), *[case.shape.pattern[-1:] == (1,)] * place.depths(case.shape)]


def _rate(hardware: Hardware, efficiency: float) -> float:
    return hardware.tflops * 1e12 * efficiency


def _moved(case: MemoryCase, hardware: Hardware, mixture: bool) -> float:
    # What a layer keeps is written and read in forward, read in backward, and has a gradient.
    touched = 4 * layer_bytes(case.shape, case.activations, mixture=mixture)
    return touched / (hardware.memory_gbps * 1e9 * hardware.bandwidth_efficiency)


def _layer_forward(case: MemoryCase, flops: ForwardFlops, hardware: Hardware, mixture: bool) -> float:
    tokens = case.activations.tokens / case.activations.tensor_parallel
    attention = (flops.layer_attention + flops.padding) / _rate(hardware, hardware.attention_efficiency)
    return tokens * (_products(case, flops, hardware, mixture) + attention)


def _chunk_compute(case: MemoryCase, flops: ForwardFlops, hardware: Hardware, place: ChunkPlace) -> float:
    kinds, seconds = _chunk_kinds(case, place), 0.0
    for kind in set(kinds):
        layer = 3 * _layer_forward(case, flops, hardware, kind) + _moved(case, hardware, kind)
        seconds += kinds.count(kind) * layer
    if place.last:
        tokens = case.activations.tokens / case.activations.tensor_parallel
        head = (1 + flops.depths) * flops.head + flops.depths * flops.depth_projection
        seconds += 3 * tokens * head / _rate(hardware, hardware.matrix_efficiency)
    return seconds


def _weight_gradients(case: MemoryCase, flops: ForwardFlops, hardware: Hardware, place: ChunkPlace) -> float:
    """As long as the forward's products with weights; attention has none."""
    tokens = case.activations.tokens / case.activations.tensor_parallel
    seconds = 0.0
    for mixture in _chunk_kinds(case, place):
        seconds += _products(case, flops, hardware, mixture)
    if place.last:
        head = (1 + flops.depths) * flops.head + flops.depths * flops.depth_projection
        seconds += head / _rate(hardware, hardware.matrix_efficiency)
    return tokens * seconds


def _products(case: MemoryCase, flops: ForwardFlops, hardware: Hardware, mixture: bool) -> float:
    """Seconds per token of a layer's products with weights, forward."""
    matrices, routed = flops.matrices(mixture), 0.0
    if mixture:
        # The busiest rank is waited for; its products are many small ones.
        matrices -= flops.experts
        routed = flops.experts * case.activations.expert_rows
    return matrices / _rate(hardware, hardware.matrix_efficiency) + routed / _rate(
        hardware, hardware.expert_efficiency
    )


def _recompute(case: MemoryCase, flops: ForwardFlops, hardware: Hardware, stage: int) -> float:
    recompute = case.activations.recompute
    kinds = _kinds(case, stage)
    tokens = case.activations.tokens / case.activations.tensor_parallel
    if recompute.granularity == "full":
        again = [
            kind
            for place in places(case, stage)
            for kind in place.kinds(case.shape)[: recompute.recomputed_layers(place.layers)]
        ]
        own, last = sum(place.layers for place in places(case, stage)), places(case, stage)[-1].layers
        again += [
            kind for depth, kind in enumerate(kinds[own:], start=1) if recompute.recomputes_depth(last, depth)
        ]
        return sum(
            _layer_forward(case, flops, hardware, kind)
            + _moved(case, hardware, kind) / 2
            + _collectives(case, hardware, 2)
            + (_exchange(case, hardware, 2) if kind else 0.0)
            for kind in again
        )
    seconds = 0.0
    if recompute.granularity == "selective":
        again_each = flops.layer_attention + flops.padding
        seconds += len(kinds) * tokens * again_each / _rate(hardware, hardware.attention_efficiency)
    if recompute.mla_up_proj:
        seconds += len(kinds) * tokens * flops.up_projections / _rate(hardware, hardware.matrix_efficiency)
    if recompute.moe_layer:
        routed = flops.experts * case.activations.expert_rows / _rate(hardware, hardware.expert_efficiency)
        others = (flops.router + flops.shared_experts) / _rate(hardware, hardware.matrix_efficiency)
        seconds += sum(kinds) * (tokens * (routed + others) + _exchange(case, hardware, 2))
    return seconds


def _exchange(case: MemoryCase, hardware: Hardware, count: int) -> float:
    """Seconds of ``count`` exchanges of tokens with the ranks that hold their experts, in one layer: two
    in forward and two in backward."""
    options, size, tensor = case.activations, case.expert_parallel, case.activations.tensor_parallel
    if size * tensor == 1:
        return 0.0
    width = case.shape.hidden_size * options.element_bytes
    span = tensor * options.context_parallel * size
    if options.expert_dispatcher == "allgather":
        gathered = (size * tensor - 1) / (size * tensor) * options.tokens * size * width
        return count * (gathered / _bandwidth(hardware, span) + hardware.latency)
    rows, seconds = expert_rows(case.shape, options) * width, 0.0
    if size > 1:
        sent = (size - 1) / size * rows / tensor
        seconds += sent / _bandwidth(hardware, span) + hardware.latency
    if tensor > 1:
        # Every tensor-parallel rank has a part of each expert and needs all the rows.
        seconds += (tensor - 1) / tensor * rows / _bandwidth(hardware, tensor) + hardware.latency
    return count * seconds


def _bandwidth(hardware: Hardware, span: int) -> float:
    inside = span <= hardware.devices_per_node and hardware.devices_per_node % span == 0
    link = hardware.intra_node_gbps if inside else hardware.inter_node_gbps
    return link * 1e9 * hardware.bandwidth_efficiency


def _collectives(case: MemoryCase, hardware: Hardware, count: float) -> float:
    """Seconds of ``count`` all-reduces, or pairs of gather and scatter, of one residual stream."""
    size = case.activations.tensor_parallel
    if size == 1:
        return 0.0
    whole = case.activations.tokens * case.shape.hidden_size * case.activations.element_bytes
    return count * (2 * (size - 1) / size * whole / _bandwidth(hardware, size) + hardware.latency)


def _tensor_parallel(case: MemoryCase, hardware: Hardware) -> float:
    # Two in forward; of the two in backward about half hides behind weight gradients. Sequence
    # parallelism gathers the inputs once more there, beside the input gradients' products.
    return _collectives(case, hardware, 2 + 1)


def _context_parallel(case: MemoryCase, hardware: Hardware) -> float:
    options = case.activations
    size = options.context_parallel
    if size == 1:
        return 0.0
    width = exchanged_width(case.shape, options)
    gathered = options.micro_batch * options.sequence * width * options.element_bytes
    span = options.tensor_parallel * size
    # Keys and values are gathered in forward and in backward, and their gradients are scattered.
    return 3 * ((size - 1) / size * gathered / _bandwidth(hardware, span) + hardware.latency)


def _transfer(case: MemoryCase, hardware: Hardware) -> float:
    if case.pipeline_parallel == 1:
        return 0.0
    options = case.activations
    ranks = options.tensor_parallel * options.context_parallel * case.data_parallel
    world = ranks * case.pipeline_parallel
    one = hidden_bytes(case.shape, options) / _bandwidth(hardware, world) + hardware.latency
    # The interleaved schedule sends while it computes.
    return 2 * case.chunks * one * (1 - hardware.overlap if case.chunks > 1 else 1.0)


def _data_parallel(case: MemoryCase, stage: int, hardware: Hardware, one: float) -> float:
    """Gradients and weights of one stage over the ranks that share them: experts have fewer of those."""
    options = case.activations
    size = case.data_parallel * options.context_parallel
    if size == 1:
        return 0.0
    scatter = gather = 0.0
    for experts, ranks in ((False, size), (True, size // case.expert_parallel)):
        state = state_memory(case, stage, experts=experts)
        once, back = _reduction(case, state, ranks, hardware)
        scatter, gather = scatter + once, gather + back
    if not case.state.overlap_grad_reduce:
        return scatter + gather + 2 * hardware.latency
    # Gradients hide behind the last backward pass (2/3 of a micro-batch); weights behind the first
    # forward pass, which only the distributed optimizer can wait for.
    hidden = hardware.overlap * one
    scatter = max(0.0, scatter - hidden * 2 / 3)
    gather = max(0.0, gather - hidden / 3) if case.state.distributed else gather
    return scatter + gather + 2 * hardware.latency


def _reduction(
    case: MemoryCase, state: ParameterMemory, ranks: int, hardware: Hardware
) -> tuple[float, float]:
    share = (ranks - 1) / ranks
    span = case.activations.tensor_parallel * case.activations.context_parallel * case.data_parallel
    bandwidth = _bandwidth(hardware, span)
    scatter = share * state.gradients / bandwidth
    return scatter, share * (state.weights if case.state.distributed else state.gradients) / bandwidth


def _optimizer(memory: RankMemory, hardware: Hardware) -> float:
    # State is read and written; gradients and weights are touched once.
    touched = 2 * memory.optimizer + memory.gradients + memory.weights
    return touched / (hardware.memory_gbps * 1e9 * hardware.bandwidth_efficiency)
