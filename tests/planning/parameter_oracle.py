"""Counts parameters the other way: builds Megatron-Core's GPTModel and adds them up.

Run as a process (``python -m tests.planning.parameter_oracle DEVICE``), because patching is global:
one JSON list of command lines comes in per line, one JSON list of ``[total, active, embedding,
head]`` goes out.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def build(argv: list[str], device: str) -> Any:
    """GPTModel of the configuration ``argv``, on ``device`` (``meta`` or ``cpu``)."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from mt_megatron.config.parse import load_config
    from mt_megatron.planning.build import transformer_config

    config = load_config([*argv, "--use-cpu-initialization", "--no-initialization"])
    model = config.model
    with torch.device(device):
        return GPTModel(
            config=transformer_config(config),
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=model.num_moe_experts,
                moe_grouped_gemm=model.moe_grouped_gemm,
                qk_layernorm=model.qk_layernorm,
            ),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_position_embeddings,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
        )


def count(model: Any) -> list[int]:
    """``[total, active, embedding, head]``, by walking over the parameters' names."""
    total = active = embedding = head = 0
    topk, experts = model.config.moe_router_topk, model.config.num_moe_experts
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if ".local_experts." in name:
            index = int(name.split(".local_experts.")[1].split(".")[0])
            active += parameter.numel() if index < min(topk, experts) else 0
        else:
            active += parameter.numel()
        embedding += parameter.numel() if name.startswith("embedding.") else 0
        head += parameter.numel() if name.startswith("output_layer.") else 0
    return [total, active, embedding, head]


def main() -> None:
    """Answer until standard input ends."""
    warnings.simplefilter("ignore")
    import torch.distributed as dist

    import mt_megatron

    mt_megatron.patch("cpu")
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for line in sys.stdin:
        print(
            "counts:" + json.dumps([count(build(argv, sys.argv[1])) for argv in json.loads(line)]), flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
