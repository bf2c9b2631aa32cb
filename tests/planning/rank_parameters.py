"""Builds what single ranks of a layout hold, on ``meta`` and without any process group.

Run as a process (``python -m tests.planning.rank_parameters``): one JSON list of requests comes in per
line, each ``[command line, tp rank, ep rank]``; one JSON list goes out, for each request the sizes of the
parameters of every chunk of every pipeline stage, in the order in which they are registered, and the
sizes of the buffers of experts' biases.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any


def chunks(argv: list[str], tp_rank: int, ep_rank: int) -> list[dict[str, list[int]]]:
    """``parameters`` and ``biases`` of each model chunk, in the order that a batch takes."""
    import torch
    from megatron.core import parallel_state

    from mt_megatron.config.parse import load_config
    from mt_megatron.models.families import family_of
    from mt_megatron.planning.build import transformer_config
    from mt_megatron.planning.memory_estimate import padded_shape

    # The other dispatcher reads an order of experts from the device; neither has parameters.
    dispatcher = ["--moe-token-dispatcher-type", "allgather"]
    config = load_config([*argv, *dispatcher, "--use-cpu-initialization", "--no-initialization"])
    model, parallel = config.model, config.parallel
    stages, count = parallel.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    parallel_state.set_tensor_model_parallel_world_size(parallel.tensor_model_parallel_size)
    parallel_state.set_tensor_model_parallel_rank(tp_rank)
    parallel_state.set_expert_model_parallel_world_size(parallel.expert_model_parallel_size)
    parallel_state.set_expert_model_parallel_rank(ep_rank)
    parallel_state.set_pipeline_model_parallel_world_size(stages)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(count)
    family: Any = family_of(config)
    transformer, found = transformer_config(config), []
    for index in range(stages * (count or 1)):
        parallel_state.set_pipeline_model_parallel_rank(index % stages)
        if count:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index // stages)
        # Upstream prints a warning where tied weights are made equal without processes.
        with torch.device("meta"), contextlib.redirect_stdout(sys.stderr):
            # The model alone: its family sets what comes from processes, which are not here.
            chunk = family._model(
                config,
                transformer,
                vocab_size=padded_shape(config).vocab_size,
                max_sequence_length=model.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
                position_embedding_type=model.position_embedding_type,
            )
        buffers = chunk.named_buffers()
        found.append(
            {
                "parameters": [parameter.numel() for parameter in chunk.parameters()],
                "biases": [buffer.numel() for name, buffer in buffers if name.endswith(".expert_bias")],
            }
        )
    return found


def main() -> None:
    """Answer until standard input ends."""
    warnings.simplefilter("ignore")
    import mt_megatron

    mt_megatron.patch("cpu")
    for line in sys.stdin:
        answers: list[Any] = [chunks(*request) for request in json.loads(line)]
        print("chunks:" + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
