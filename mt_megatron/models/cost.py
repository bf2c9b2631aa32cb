"""Estimated time of one training step by part: a stated cost model for ranking layouts, not a measurement.

Each part is work divided by a rate of ``Hardware``:

* matrix products and attention by the device's peak times the efficiency assumed for them, recomputed
  layers once more; everything else of a layer by the bytes it moves;
* tensor- and context-parallel collectives as rings over the slowest link they cross, half of those of
  the backward pass hidden behind matrix products;
* the pipeline's bubble, (p - 1) / v micro-batches of the slowest stage (arXiv 2104.04473, section 2.2);
* gradients and weights over the data-parallel ranks, less what hides behind one micro-batch;
* the optimizer by the bytes of its state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mt_megatron.models.activation_memory import hidden_bytes, layer_bytes
from mt_megatron.models.flops import ForwardFlops, forward_flops
from mt_megatron.models.hardware import Hardware
from mt_megatron.models.memory import MemoryCase, RankMemory, stage_layers


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of one optimizer step on its critical path."""

    compute: float
    """Forward and backward passes, without what is computed twice."""

    recompute: float
    tensor_parallel: float
    context_parallel: float
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


def step_cost(case: MemoryCase, memory: RankMemory, hardware: Hardware) -> StepCost:
    """Estimated seconds of one step. ``memory`` is that of the rank that holds most."""
    flops = forward_flops(case.shape, case.activations.sequence)
    stage = max(
        range(case.pipeline_parallel),
        key=lambda index: _stage_compute(case, flops, hardware, index),
    )
    layers = stage_layers(case)[stage]
    batches = case.num_microbatches
    compute = _stage_compute(case, flops, hardware, stage)
    again = _recompute(case, flops, hardware, layers)
    tensor, context = layers * _tensor_parallel(case, hardware), layers * _context_parallel(case, hardware)
    transfer = _transfer(case, hardware)
    one = compute + again + tensor + context + transfer
    return StepCost(
        compute=batches * compute,
        recompute=batches * again,
        tensor_parallel=batches * tensor,
        context_parallel=batches * context,
        pipeline=batches * transfer,
        bubble=(case.pipeline_parallel - 1) / case.chunks * one,
        data_parallel=_data_parallel(case, memory, hardware, one),
        optimizer=_optimizer(memory, hardware),
    )


def _rate(hardware: Hardware, efficiency: float) -> float:
    return hardware.tflops * 1e12 * efficiency


def _moved(case: MemoryCase, hardware: Hardware) -> float:
    # What a layer keeps is written and read in forward, read in backward, and has a gradient.
    touched = 4 * layer_bytes(case.shape, case.activations)
    return touched / (hardware.memory_gbps * 1e9 * hardware.bandwidth_efficiency)


def _layer_forward(case: MemoryCase, flops: ForwardFlops, hardware: Hardware) -> float:
    tokens = case.activations.tokens / case.activations.tensor_parallel
    return tokens * (
        flops.layer_matrices / _rate(hardware, hardware.matrix_efficiency)
        + flops.layer_attention / _rate(hardware, hardware.attention_efficiency)
    )


def _stage_compute(case: MemoryCase, flops: ForwardFlops, hardware: Hardware, stage: int) -> float:
    layer = 3 * _layer_forward(case, flops, hardware) + _moved(case, hardware)
    seconds = stage_layers(case)[stage] * layer
    if stage == case.pipeline_parallel - 1:
        tokens = case.activations.tokens / case.activations.tensor_parallel
        seconds += 3 * tokens * flops.head / _rate(hardware, hardware.matrix_efficiency)
    return seconds


def _recompute(case: MemoryCase, flops: ForwardFlops, hardware: Hardware, layers: int) -> float:
    recompute = case.activations.recompute
    if recompute.granularity == "selective":
        tokens = case.activations.tokens / case.activations.tensor_parallel
        return layers * tokens * flops.layer_attention / _rate(hardware, hardware.attention_efficiency)
    again = case.chunks * recompute.recomputed_layers(layers // case.chunks)
    forward = _layer_forward(case, flops, hardware) + _moved(case, hardware) / 2
    return again * (forward + _collectives(case, hardware, 2))


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
    keys = 2 * case.shape.num_query_groups * case.shape.kv_channels / options.tensor_parallel
    gathered = options.micro_batch * options.sequence * keys * options.element_bytes
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


def _data_parallel(case: MemoryCase, memory: RankMemory, hardware: Hardware, one: float) -> float:
    options = case.activations
    size = case.data_parallel * options.context_parallel
    if size == 1:
        return 0.0
    share = (size - 1) / size
    bandwidth = _bandwidth(hardware, options.tensor_parallel * size)
    scatter = share * memory.gradients / bandwidth
    gather = share * (memory.weights if case.state.distributed else memory.gradients) / bandwidth
    if not case.state.overlap_grad_reduce:
        return scatter + gather + 2 * hardware.latency
    # Gradients hide behind the last backward pass (2/3 of a micro-batch); weights behind the first
    # forward pass, which only the distributed optimizer can wait for.
    hidden = hardware.overlap * one
    scatter = max(0.0, scatter - hidden * 2 / 3)
    gather = max(0.0, gather - hidden / 3) if case.state.distributed else gather
    return scatter + gather + 2 * hardware.latency


def _optimizer(memory: RankMemory, hardware: Hardware) -> float:
    # State is read and written; gradients and weights are touched once.
    touched = 2 * memory.optimizer + memory.gradients + memory.weights
    return touched / (hardware.memory_gbps * 1e9 * hardware.bandwidth_efficiency)
