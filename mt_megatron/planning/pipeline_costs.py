"""Inputs of the pipeline simulator for a configuration: the cost model's times, bytes and links.

Estimates, not measurements; ``mt_megatron.scan.analysis.pipeline_steps`` has the same from a traced run.
"""

from __future__ import annotations

from mt_megatron.pipeline.simulate.costs import Costs, Link
from mt_megatron.planning.activation_memory import hidden_bytes
from mt_megatron.planning.cost import passes, stage_times
from mt_megatron.planning.hardware import Hardware
from mt_megatron.planning.memory import (
    MemoryCase,
    estimate_memory,
    kept_bytes,
    placement_of,
    places,
    state_memory,
)


def pipeline_costs(case: MemoryCase, hardware: Hardware) -> Costs:
    """Seconds and bytes of each stage (model chunk, in the order that a batch takes), and the links between
    pipeline ranks: those of a node where the whole pipeline is in one, else those between nodes."""
    times, ranks, options = stage_times(case, hardware), case.pipeline_parallel, case.activations
    placement = placement_of(case)
    own = [(placement.rank(index), placement.chunk(index)) for index in range(placement.stages)]
    forwards, backwards = passes(times, placement, transfers=False)
    weights = [times[rank].weights[chunk] for rank, chunk in own]
    beside = options.tensor_parallel * options.context_parallel * case.data_parallel
    inside = beside * ranks <= hardware.devices_per_node
    bandwidth = (hardware.intra_node_gbps if inside else hardware.inter_node_gbps) * 1e9
    kept, static, reductions = [], [], []
    memory = estimate_memory(case).stages
    for rank, chunk in own:
        kept.append(float(kept_bytes(case, places(case, rank)[chunk])))
        # A rank's bytes in whole numbers over its chunks, so that their sum is exact.
        share, rest = divmod(memory[rank].total - memory[rank].activations, case.chunks)
        static.append(float(share + (rest if chunk == 0 else 0)))
        reductions.append(_reduction(case, hardware, rank) / case.chunks)
    return Costs(
        forward=forwards,
        backward=backwards,
        weight=weights,
        message=float(hidden_bytes(case.shape, options)),
        link=Link(hardware.latency, bandwidth * hardware.bandwidth_efficiency),
        reduction=reductions,
        activation=kept,
        static=static,
    )


def _reduction(case: MemoryCase, hardware: Hardware, rank: int) -> float:
    """Seconds of the reduction of a rank's gradients over its replicas, as a ring between nodes."""
    size = case.data_parallel * case.activations.context_parallel
    if size == 1:
        return 0.0
    beside = case.activations.tensor_parallel * size
    inside = beside <= hardware.devices_per_node and hardware.devices_per_node % beside == 0
    link = (hardware.intra_node_gbps if inside else hardware.inter_node_gbps) * 1e9
    gradients = state_memory(case, rank).gradients
    rounds = 1 if case.state.distributed else 2
    moved = rounds * (size - 1) / size * gradients
    return moved / (link * hardware.bandwidth_efficiency) + hardware.latency
