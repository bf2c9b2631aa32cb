"""A loop as people write them with Megatron-Core's schedules, evaluation between steps, no word of us.

python recorded_script.py FOLDER TENSOR PIPELINE STEPS [raise|exit|kill]: rank 0 of the last stage writes
FOLDER/losses.json. With an ending every rank ends so in the middle of the third step;
``kill`` waits for a file ``now``.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

SEQUENCE, VOCABULARY, MICRO_BATCH, MICRO_BATCHES = 16, 64, 2, 2


def build(seed, alone):
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.1, hidden_dropout=0.1,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32, finalize_model_grads_func=None if alone else finalize_model_grads,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(), share_embeddings_and_output_weights=False,
    ).cuda()  # fmt: skip
    if alone:
        # As upstream's examples/run_simple_mcore_train_loop.py: neither wrapper nor optimizer of Megatron's.
        return model, torch.optim.Adam(model.parameters(), lr=1e-2), None
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    options = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, clip_grad=1.0)
    optimizer = get_megatron_optimizer(options, [wrapped])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=10_000,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=10_000, wd_incr_style="constant",
    )  # fmt: skip
    return wrapped, optimizer, scheduler


def samples(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator).cuda()


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(SEQUENCE, device="cuda").expand(MICRO_BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda").tril() < 0.5
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return output, lambda losses: (losses.mean(), {"lm loss": losses.mean().detach()})


def run(model, batches, forward_only):
    return get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches, model=[model], num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH, forward_only=forward_only,
    )  # fmt: skip


def train(steps, *, alone=False, ending="", counted=0, seconds=0.0, until=lambda: False):
    """Losses of the last stage; empty on others."""
    model, optimizer, scheduler = build(1, alone)
    if counted:
        scheduler.load_state_dict({**scheduler.state_dict(), "num_steps": counted})
    batches, found = samples(2), []
    for step in range(1, steps + 1):
        if alone:
            optimizer.zero_grad()
        else:
            model.zero_grad_buffer()
            optimizer.zero_grad()
        reported = run(model, batches, False)
        end(ending, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(MICRO_BATCHES * MICRO_BATCH * parallel_state.get_data_parallel_world_size())
        found += [sum(each["lm loss"].item() for each in reported) / len(reported)] if reported else []
        if step % 2 == 0:
            model.eval()
            run(model, samples(3), True)
            model.train()
        time.sleep(seconds)
        if until():
            break
    return found


def end(ending, step):
    if ending and step == 3:
        if ending == "raise":
            raise ValueError("the third step is too much")
        if ending == "exit":
            sys.exit(7)
        while not os.path.exists("now"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def initialize(tensor, pipeline):
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor, pipeline)


def main(folder, tensor, pipeline, steps, ending=""):
    initialize(int(tensor), int(pipeline))
    losses = train(int(steps), ending=ending)
    if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
        with open(os.path.join(folder, "losses.json"), "w") as file:
            json.dump(losses, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
