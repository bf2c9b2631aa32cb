"""What the ranks of the tests in this folder run; each function returns JSON-able results."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.backends.distributed.namespace import shared_groups
from mt_megatron.parallel import rank_layout


def _threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def backends_of_groups() -> dict[str, Any]:
    mt_megatron.patch("cpu")
    from megatron.core import parallel_state

    scoped = parallel_state.torch.distributed  # type: ignore[attr-defined]
    scoped.init_process_group("nccl", device_id=parallel_state.torch.device("cuda", 0))  # type: ignore[attr-defined]
    found = {"init": dist.get_backend(), "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
    for name, requested in (("new", "nccl"), ("both", "cpu:gloo,cuda:nccl"), ("none", None)):
        group = scoped.new_group([0, 1], backend=requested)
        value = torch.ones(2)
        dist.all_reduce(value, group=group)
        found[name] = [dist.get_backend(group), value.tolist()]
    group = scoped.new_group([0, 1], None, "nccl", scoped.ProcessGroupNCCL.Options())
    scoped.barrier(group, device_ids=[0])
    found["options"] = dist.get_backend(group)
    return found


_START = "_PIPELINE_MODEL_PARALLEL_DECODER_START"


def initialise_and_destroy(times: int) -> dict[str, Any]:
    mt_megatron.patch("cpu")
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    before = _threads_and_descriptors()
    during = before
    for _ in range(times):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        # As on ranks of an encoder whose tensor parallelism is smaller than the decoder's.
        pipelines = [parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, dist.new_group([0, 1])]
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = pipelines
        setattr(parallel_state, _START, 1)
        del pipelines
        during = max(during, _threads_and_descriptors())
        # Each rank connects to a Gloo group in its own time: one that closed now could fail the other.
        dist.barrier()
        parallel_state.destroy_model_parallel()
    value = torch.ones(1)
    dist.all_reduce(value)  # the caller's own group must survive
    left = [n for n, v in vars(parallel_state).items() if isinstance(v, dist.ProcessGroup)]
    left += [n for n in ("_PIPELINE_MODEL_PARALLEL_GROUP", _START) if getattr(parallel_state, n) is not None]
    return {"before": before, "during": during, "after": _threads_and_descriptors(), "left": left}


def default_groups_one_after_another(times: int) -> list[float]:
    """Sums over both ranks in default groups of Megatron's layout; the ranks take turns to be late."""
    backend = mt_megatron.patch("cpu") and mt_megatron.backend()
    sums = []
    for number in range(times):
        if number % 2 == int(os.environ["RANK"]):
            time.sleep(0.3)
        rank_layout.initialize(rank_layout.RankLayout(world_size=2, tp=2), backend, timedelta(seconds=20))
        value = torch.ones(1)
        dist.all_reduce(value)
        sums.append(value.item())
        rank_layout.destroy()
    return sums


def leave_as_soon_as_groups_are_made(late: float) -> dict[str, float]:
    """Rank 1 is ``late`` seconds late from making its last group; rank 0 ends its groups at once."""
    mt_megatron.patch("cpu")
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    real, made = dist.new_group, []

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = real(*args, **kwargs)
        if dist.get_rank() == 1 and args[0] == [0, 1]:
            time.sleep(late)
        made.append(time.monotonic())
        return group

    with mock.patch.object(dist, "new_group", new_group):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    done = time.monotonic()
    parallel_state.destroy_model_parallel()
    dist.barrier()
    return {"made": made[-1], "done": done}


def start_and_leave(times: int) -> int:
    """Groups made and ended at once ``times`` times; how many of them failed.

    For root the thread that waits for connections runs only when nothing else does, and Gloo's own threads
    before all others: a peer overtakes it then, which beside busy loops alone hardly ever happens.
    """
    mt_megatron.patch("cpu")
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    ended = threading.Event()
    if os.geteuid() == 0 and dist.get_rank() == 1:
        threading.Thread(target=_prefer_others, args=(ended,), daemon=True).start()
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    failed = 0
    for _ in range(times):
        try:
            with shared_groups():
                # Only the caller holds it, so it is closed by the next line.
                dist.destroy_process_group(parallel_state.torch.distributed.new_group([0, 1]))  # type: ignore[attr-defined]
        except RuntimeError as error:
            if "connectFullMesh" not in str(error):
                raise
            failed += 1
        dist.barrier()
    ended.set()
    return failed


def _prefer_others(ended: threading.Event) -> None:
    """Give every thread but the main one real-time priority until ``ended``."""
    main, seen = os.getpid(), set()
    while not ended.wait(0.0005):
        for thread in {int(name) for name in os.listdir("/proc/self/task")} - seen - {main}:
            seen.add(thread)
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))


def groups_of_two() -> dict[str, Any]:
    mt_megatron.patch("cpu")
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = [dist.get_process_group_ranks(g) for g in dist.distributed_c10d._world.pg_map]
    tensor, model = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
    )
    sums = []
    for group in (tensor, model, parallel_state.get_data_parallel_group()):
        value = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(value, group=group)
        sums.append(value.item() if group.size() > 1 else 1.0)
    other = parallel_state.torch.distributed.new_group([0, 1])  # type: ignore[attr-defined]
    return {"groups": sorted(groups), "sum": sums, "apart": other is not tensor and tensor is model}


def leak_without_the_patch(times: int) -> dict[str, Any]:
    mt_megatron.patch("cpu", features=["device"])
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    before = _threads_and_descriptors()
    for _ in range(times):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        parallel_state.destroy_model_parallel()
    return {"before": before, "after": _threads_and_descriptors()}


def moe_losses(dispatcher: str, experts: int, expert_parallel: int, wrong_bounds: bool = False) -> Any:
    """Loss and gradient norms of a small MoE GPT whose weights depend on the expert alone."""
    mt_megatron.patch("cpu")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    if wrong_bounds:
        # What a port does that counts tokens per expert without the range of its own experts.
        from mt_megatron.layers.moe import token_dispatch

        own = token_dispatch._counts
        token_dispatch._counts = lambda routing: own(routing) + dist.get_rank()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=48,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=expert_parallel,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(num_experts=experts), 64, 16)
    first = parallel_state.get_expert_model_parallel_rank() * (experts // expert_parallel)
    for name, parameter in model.named_parameters():
        head, found, tail = name.partition("local_experts.")
        if found:
            index, _, rest = tail.partition(".")
            name = f"{head}expert{first + int(index)}.{rest}"
        seed = sum((i + 1) * ord(c) for i, c in enumerate(name)) % (2**31)
        if parameter.dim() > 1:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.05
            parameter.data.copy_(values)
    per_rank = 4 // dist.get_world_size()
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(5))
    tokens = tokens[dist.get_rank() * per_rank : (dist.get_rank() + 1) * per_rank]
    positions = torch.arange(16).expand(per_rank, 16)
    losses = model(tokens, positions, None, labels=tokens)
    losses.sum().backward()
    shared = torch.cat(
        [
            p.grad.view(-1)
            for n, p in model.named_parameters()
            if "local_experts" not in n and p.grad is not None
        ]
    )
    total = torch.stack([losses.sum().detach()])
    dist.all_reduce(shared)
    dist.all_reduce(total)
    experts_norm = sum(
        float(p.grad.double().pow(2).sum()) for n, p in model.named_parameters() if "local_experts" in n
    )
    squared = torch.tensor(experts_norm, dtype=torch.float64)
    dist.all_reduce(squared)
    return [
        float(total),
        float(shared.double().norm()),
        float(squared.sqrt()) if expert_parallel > 1 else experts_norm**0.5,
    ]


def checkpoint_round_trip(folder: str, format_name: str, dtype: str) -> dict[str, Any]:
    """Save a sharded tensor, a flattened one, an object and common data; load them back."""
    mt_megatron.patch("cpu")
    import argparse

    import numpy
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = dist.get_rank()
    kind = getattr(torch, dtype)
    full = torch.arange(24, dtype=torch.float32).view(8, 3).to(kind)
    mine = full[rank * 4 : rank * 4 + 4].clone()

    def state(tensor: torch.Tensor, flat: torch.Tensor) -> dict[str, Any]:
        return {
            "weight": ShardedTensor.from_rank_offsets("weight", tensor, (0, rank, 2)),
            "flat": ShardedTensor.from_rank_offsets_flat(
                "flat", flat, (5, 2), flattened_range=slice(rank * 5, rank * 5 + 5)
            ),
            "object": ShardedObject("object", {"rng": numpy.arange(3), "rank": rank}, (2,), (rank,)),
            "common": {
                "args": argparse.Namespace(lr=0.1),
                "iteration": 7,
                "rng": numpy.random.RandomState(0).get_state(),
            },
        }

    flat = torch.arange(10, dtype=torch.float32).to(kind)[rank * 5 : rank * 5 + 5].clone()
    dist_checkpointing.save(state(mine, flat), folder, get_default_save_sharded_strategy(format_name))
    loaded = dist_checkpointing.load(state(torch.empty_like(mine), torch.empty_like(flat)), folder)
    # Another layout reads the same file: every rank takes the whole tensor.
    whole = {"weight": ShardedTensor.from_rank_offsets("weight", torch.empty_like(full), replica_id=rank)}
    resharded = dist_checkpointing.load(whole, folder)
    return {
        "weight": bool(torch.equal(loaded["weight"], mine)),
        "flat": bool(torch.equal(loaded["flat"], flat)),
        "object": loaded["object"]["rank"] == rank and loaded["object"]["rng"].tolist() == [0, 1, 2],
        "common": [loaded["common"]["iteration"], loaded["common"]["args"].lr],
        "resharded": bool(torch.equal(resharded["weight"], full)),
    }


def asynchronous_save_is_a_snapshot(folder: str) -> dict[str, Any]:
    """Tensors change while an asynchronous save runs; the file must hold what they were."""
    mt_megatron.patch("cpu")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = dist.get_rank()
    value = torch.full((512, 1024), float(rank))
    state = {"value": ShardedTensor.from_rank_offsets("value", value, (0, rank, 2))}
    calls = AsyncCallsQueue()
    children = len(os.listdir("/proc/self/task"))
    calls.schedule_async_request(
        dist_checkpointing.save(
            state, folder, get_default_save_sharded_strategy("torch_dist"), async_sharded_save=True
        )
    )
    value.fill_(99.0)
    finished = calls.maybe_finalize_async_calls(blocking=True)
    loaded = dist_checkpointing.load(
        {"value": ShardedTensor.from_rank_offsets("value", torch.empty(512, 1024), (0, rank, 2))}, folder
    )
    return {
        "finished": finished,
        "snapshot": bool((loaded["value"] == float(rank)).all()),
        "threads": children,
    }


def straggler_listens_on() -> list[str]:
    """Addresses that this process listens on once the straggler detector runs."""
    import psutil

    mt_megatron.patch("cpu")
    from megatron.core.utils import StragglerDetector

    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    detector = StragglerDetector()
    detector.configure(1, 0, mmcnt=1, port=0, prefill=4, enabled=True)
    with detector:
        torch.ones(8, 8) @ torch.ones(8, 8)
    address = detector.sock.getsockname()[0]
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    detector.sock.close()
    return [address, *listening]
