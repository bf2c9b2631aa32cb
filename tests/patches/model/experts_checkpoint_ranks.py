"""Checkpoints of experts, written and read by different kinds of them under different layouts.

Every number of a weight or of an optimizer's state says where it belongs: it is a function of the expert,
the matrix and the place in it. What is read is compared with what belongs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.patches.model.experts_ranks import EXPERTS, HIDDEN, MOE_FFN, config, initialise, start

LAYERS = 2
STATES = {"param": 0.0, "exp_avg": 1000.0, "exp_avg_sq": 2000.0}


def build(grouped: bool, tp: int, ep: int, distributed: bool) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    initialise(tp, ep)
    transformer = config(
        num_layers=LAYERS,
        moe_grouped_gemm=grouped,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1,
        bf16=True,
        params_dtype=torch.bfloat16,
        moe_token_dispatcher_type="alltoall",
    )
    spec = get_gpt_layer_local_spec(EXPERTS, grouped)
    model = GPTModel(transformer, spec, 64, 16).bfloat16()
    ddp = DistributedDataParallel(
        transformer,
        DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True),
        model,
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed,
    )  # fmt: skip
    return ddp, get_megatron_optimizer(settings, [ddp])


def belongs(layer: int, expert: int, linear: int, offset: float) -> torch.Tensor:
    """The whole matrix of one expert: whole numbers that bf16 rounds, and fp32 does not."""
    shape = (2 * MOE_FFN, HIDDEN) if linear == 1 else (HIDDEN, MOE_FFN)
    seed = int(offset) + 100 * layer + 10 * expert + linear
    return torch.randint(1, 4096, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


def local_part(whole: torch.Tensor, linear: int) -> torch.Tensor:
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if linear == 2:
        return whole.chunk(size, 1)[rank]
    return torch.cat([half.chunk(size, 0)[rank] for half in whole.chunk(2, 0)])


def experts_of(ddp: Any) -> Iterator[tuple[torch.nn.Parameter, int, list[int], int]]:
    """Every expert parameter with its layer, the experts it holds and which linear it is."""
    for number, block in enumerate(ddp.module.decoder.layers):
        local = block.mlp.local_expert_indices
        experts = block.mlp.experts
        if hasattr(experts, "weight1"):
            yield experts.weight1, number, local, 1
            yield experts.weight2, number, local, 2
            continue
        for expert, each in zip(local, experts.local_experts, strict=True):
            yield each.linear_fc1.weight, number, [expert], 1
            yield each.linear_fc2.weight, number, [expert], 2


def expected_part(entry: tuple[Any, int, list[int], int], offset: float, shift: int) -> torch.Tensor:
    _, layer, experts, linear = entry
    each = [local_part(belongs(layer, (e + shift) % EXPERTS, linear, offset), linear) for e in experts]
    return torch.cat([part.reshape(-1) for part in each])


def states_of(optimizer: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """fp32 weight and moments of ``parameter``: all of it, or this rank's slice and where it begins."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(one, "gbuf_ranges"):
            for ranges in one.gbuf_ranges:
                for buckets in ranges.values():
                    for bucket in buckets:
                        if parameter in bucket["param_map"]:
                            group, order = one.model_param_group_index_map[parameter]
                            main = one.optimizer.param_groups[group]["params"][order]
                            where = bucket["param_map"][parameter]["param"]
                            start, stop = torch.tensor(where.start), torch.tensor(where.end)
                            return {"param": main, "start": start, "stop": stop, **one.optimizer.state[main]}
            continue
        for full, masters in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
            for model, main in zip(full, masters, strict=True):
                if model is parameter:
                    stop = torch.tensor(main.numel())
                    return {
                        "param": main,
                        "start": torch.tensor(0),
                        "stop": stop,
                        **one.optimizer.state[main],
                    }
    return {}


def prepare_states(ddp: Any, optimizer: Any) -> None:
    """One step, so that every state exists."""
    for parameter in ddp.parameters():
        parameter.main_grad.fill_(0.01)
    optimizer.step()


def fill(ddp: Any, optimizer: Any) -> None:
    prepare_states(ddp, optimizer)
    with torch.no_grad():
        for entry in experts_of(ddp):
            entry[0].copy_(expected_part(entry, 0.0, 0).view(entry[0].shape))
            found = states_of(optimizer, entry[0])
            for name, offset in STATES.items():
                if found:
                    part = expected_part(entry, offset, 0)[int(found["start"]) : int(found["stop"])]
                    found[name].copy_(part.view(found[name].shape))


def wrong_numbers(ddp: Any, optimizer: Any, shift: int = 0) -> dict[str, float]:
    """How many numbers are not what belongs there, and how many were looked at."""
    result = {"weights": 0, "states": 0, "looked_at": 0}
    for entry in experts_of(ddp):
        whole = expected_part(entry, 0.0, shift)
        result["weights"] += int((entry[0].detach().reshape(-1) != whole.bfloat16()).sum())
        found = states_of(optimizer, entry[0])
        for name, offset in STATES.items():
            if found:
                part = expected_part(entry, offset, shift)[int(found["start"]) : int(found["stop"])]
                result["states"] += int((found[name].detach().reshape(-1) != part).sum())
                result["looked_at"] += part.numel()
    return result


def save(kind: dict[str, Any], folder: str) -> None:
    from megatron.core import dist_checkpointing

    ddp, optimizer = build(**kind)
    fill(ddp, optimizer)
    state: dict[str, Any] = {"model": ddp.module.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state))
    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(state, folder)


def load(kind: dict[str, Any], folder: str) -> list[dict[str, float]]:
    from megatron.core import dist_checkpointing

    ddp, optimizer = build(**kind)
    prepare_states(ddp, optimizer)
    before = wrong_numbers(ddp, optimizer)
    state: dict[str, Any] = {"model": ddp.module.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=True)
    loaded = dist_checkpointing.load(state, folder)
    ddp.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return [before, wrong_numbers(ddp, optimizer), wrong_numbers(ddp, optimizer, shift=1)]


def round_trips(folder: str, trips: list[list[Any]]) -> list[list[dict[str, float]]]:
    """Each trip: the kind that saves and the kinds that load."""
    start()
    found = []
    for number, (saver, loaders) in enumerate(trips):
        place = f"{folder}/{number}"
        save(saver, place)
        found += [load(loader, place) for loader in loaders]
    return found
