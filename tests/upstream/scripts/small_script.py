"""A training script as people write them for CUDA: Megatron-Core's API, ``cuda`` everywhere, no word of us.

python small_script.py FOLDER writes FOLDER/weights.pt before the first step and FOLDER/losses.json.
"""

import json
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from small_data import SEQUENCE, VOCABULARY, Tokens
from torch.cuda import current_device, is_available

STEPS, SAVED, MICRO_BATCH = 6, 3, 2


def initialize() -> int:
    rank = int(os.environ.get("RANK", "0"))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("nccl", rank=rank, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return rank


def build():
    from torch.cuda.amp import autocast  # what is imported in a function is the device's too

    config = TransformerConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, attention_dropout=0.0,
        hidden_dropout=0.0, pipeline_dtype=torch.float32, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).cuda()
    with autocast(enabled=False):
        assert next(model.parameters()).type() == "torch.cuda.FloatTensor"
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert isinstance(next(model.parameters()).data, torch.cuda.FloatTensor)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    options = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=1.0)
    return wrapped, get_megatron_optimizer(options, [wrapped])


def forward_step(batches, model):
    tokens = next(batches).to("cuda", non_blocking=True)
    positions = torch.arange(SEQUENCE, device="cuda").expand(tokens.size(0), -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, device=torch.cuda.current_device()).tril() < 0.5
    losses = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

    def mean(output):
        loss = output.mean()
        everyone = loss.detach().clone()
        dist.all_reduce(everyone, group=parallel_state.get_data_parallel_group())
        return loss, everyone / parallel_state.get_data_parallel_world_size()

    return losses, mean


def train(model, optimizer, batches, steps):
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=batches, model=[model], num_microbatches=1,
            seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH, forward_only=False,
        )  # fmt: skip
        assert optimizer.step()[0]
        yield reported[0].cuda().item()


def save(folder, rank, model, optimizer):
    os.makedirs(os.path.join(folder, "sharded"), exist_ok=True)
    dist.barrier(device_ids=[torch.cuda.current_device()])
    dist_checkpointing.save(model.module.sharded_state_dict(), os.path.join(folder, "sharded"))
    torch.save(optimizer.state_dict(), os.path.join(folder, f"optimizer.{rank}.pt"))


def resume(folder, rank):
    model, optimizer = build()
    model.module.load_state_dict(
        dist_checkpointing.load(model.module.sharded_state_dict(), os.path.join(folder, "sharded"))
    )
    at = {"cuda:0": f"cuda:{current_device()}"}
    optimizer.load_state_dict(torch.load(os.path.join(folder, f"optimizer.{rank}.pt"), map_location=at))
    optimizer.reload_model_params()
    return model, optimizer


def loader(rank, first):
    world = parallel_state.get_data_parallel_world_size()
    samples = range((first * world + rank) * MICRO_BATCH, STEPS * world * MICRO_BATCH)
    indices = [i for i in samples if i // MICRO_BATCH % world == rank]
    return iter(
        torch.utils.data.DataLoader(
            torch.utils.data.Subset(Tokens(STEPS * world * MICRO_BATCH), indices), batch_size=MICRO_BATCH,
            num_workers=1, multiprocessing_context="fork" if first else "spawn", pin_memory=True,
        )
    )  # fmt: skip


def child(index, folder):
    import torch

    tensor = torch.ones(2, device="cuda") + index
    with open(os.path.join(folder, f"child.{os.environ.get('RANK', '0')}.json"), "w") as file:
        json.dump([tensor.type(), torch.cuda.device_count(), is_available()], file)


def main(folder):
    rank = initialize()
    model, optimizer = build()
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(folder, "weights.pt"))
    losses = list(train(model, optimizer, loader(rank, 0), SAVED))
    save(folder, rank, model, optimizer)
    losses += train(model, optimizer, loader(rank, SAVED), STEPS - SAVED)
    again, resumed = resume(folder, rank)
    repeated = list(train(again, resumed, loader(rank, SAVED), STEPS - SAVED))
    if rank == 0:
        torch.multiprocessing.spawn(child, (folder,), nprocs=1)
        other = "import torch, small_data as d; print(torch.cuda.is_available(), d.torch.cuda.is_available())"
        told = subprocess.run(
            [sys.executable, "-c", other], cwd=os.path.dirname(__file__), capture_output=True, text=True
        )
        with open(os.path.join(folder, "losses.json"), "w") as file:
            json.dump({"losses": losses, "repeated": repeated, "told": told.stdout.split()}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
