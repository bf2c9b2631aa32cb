"""A pipelined training script as people write them for CUDA, with no word of us.

python two_stages.py FILE trains two chunks per rank and writes the losses of all steps to FILE; with ``one``
after it there is one chunk per rank.
"""

import json
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

SEQUENCE, VOCABULARY, MICRO_BATCHES = 8, 32, 4


def build(chunks):
    config = TransformerConfig(
        num_layers=4, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, attention_dropout=0.0,
        hidden_dropout=0.0, pipeline_dtype=torch.float32, finalize_model_grads_func=finalize_model_grads,
        pipeline_model_parallel_size=dist.get_world_size(), virtual_pipeline_model_parallel_size=chunks,
        overlap_p2p_comm=chunks is not None, batch_p2p_comm=chunks is None,
    )  # fmt: skip
    model = []
    for index in range(chunks or 1):
        if chunks:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        torch.manual_seed(100 + index)
        chunk = GPTModel(
            config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(), share_embeddings_and_output_weights=True,
        ).cuda()  # fmt: skip
        model.append(DistributedDataParallel(config, DistributedDataParallelConfig(), chunk))
    return model


def batches():
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator)


def forward_step(iterator, model):
    tokens = next(iterator).cuda()
    positions = torch.arange(SEQUENCE, device="cuda").expand(2, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda").tril() < 0.5
    losses = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return losses, lambda output: (output.mean(), {"loss": output.mean().item()})


def main():
    chunks = None if "one" in sys.argv else 2
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=dist.get_world_size(), virtual_pipeline_model_parallel_size=chunks
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build(chunks)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), model)
    iterators, found = [batches() for _ in model], []
    for _ in range(3):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators if chunks else iterators[0],
            model=model if chunks else model[0], num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE,
            micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        found += [each["loss"] for each in reported]
    if found:
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
