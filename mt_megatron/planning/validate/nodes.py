"""The check that tensor-parallel groups stay inside one node, where the fast links are."""

from __future__ import annotations

import os

from mt_megatron.config.schema import TrainingConfig


def node_problems(
    config: TrainingConfig, world_size: int, processes_per_node: int | None = None
) -> list[str]:
    """One line if a tensor-parallel group would have ranks on several nodes; empty otherwise.

    Tensor-parallel neighbours have adjacent ranks and a node has ``processes_per_node`` adjacent ones
    (torchrun's ``LOCAL_WORLD_SIZE`` when None; unknown without it, and then nothing is said), so the
    size must divide it. ``allow_tensor_parallel_across_nodes`` accepts the other case.
    """
    size = config.parallel.tensor_model_parallel_size
    local = _local_world_size() if processes_per_node is None else processes_per_node
    if local is None or world_size <= local or size < 1 or local % size == 0:
        return []
    if config.parallel.allow_tensor_parallel_across_nodes:
        return []
    fits = [str(each) for each in range(1, local + 1) if local % each == 0]
    return [
        (
            f"tensor_model_parallel_size is {size} with {local} processes on each node; expected a divisor "
            f"of that ({', '.join(fits)}): every layer would wait for the links between nodes. Lower "
            "--tensor-model-parallel-size and raise --pipeline-model-parallel-size, start another number of "
            "processes per node, or set --allow-tensor-parallel-across-nodes to accept it."
        )
    ]


def _local_world_size() -> int | None:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None
