"""A training step tells listeners what begins and ends, and pairs every begin with its end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests.launch import run_ranks

HERE = "tests.patches.test_events"


def step(sizes: dict[str, int], listen: bool = True) -> list[Any]:
    """The events of one training step with four micro-batches and the optimizer, as [phase, name, attrs]."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from mt_megatron.seams import events
    from tests.patches import small_gpt

    small_gpt.start(**sizes)
    parallel = sizes.get("tp", 1) > 1
    config = small_gpt.transformer_config(sequence_parallel=parallel)
    model = small_gpt.distributed(config, small_gpt.build(config), use_distributed_optimizer=parallel)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=parallel), [model])
    seen: list[Any] = []
    if listen:
        stop = events.subscribe(lambda phase, name, attrs: seen.append([phase, name, dict(attrs)]))
    small_gpt.train_step(model, [small_gpt.batch(seed) for seed in range(4)])
    optimizer.step()
    if listen:
        stop()
        count = len(seen)
        small_gpt.train_step(model, [small_gpt.batch()])
        assert len(seen) == count and not events.listening()
    return seen


def check_nesting(seen: list[Any]) -> None:
    open_: list[str] = []
    for phase, name, _ in seen:
        if phase == "begin":
            open_.append(name)
        else:
            assert open_.pop() == name
    assert open_ == []


def begins(seen: list[Any], name: str) -> list[dict[str, Any]]:
    return [attrs for phase, event, attrs in seen if phase == "begin" and event == name]


def test_pipeline_step():
    first, last = run_ranks(2, f"{HERE}:step", {"pp": 2})
    for rank, seen in enumerate((first, last)):
        check_nesting(seen)
        counts = Counter(name for phase, name, _ in seen if phase == "begin")
        assert (counts["forward"], counts["backward"], counts["microbatch"]) == (4, 4, 8)
        assert [a["number"] for a in begins(seen, "layer")] == [rank + 1] * 4
        forward = [a["index"] for a in begins(seen, "microbatch") if a["direction"] == "forward"]
        assert forward == [0, 1, 2, 3]
        assert [a["optimizer"] for a in begins(seen, "optimizer")] == ["FP32Optimizer"]
        sends, receives = ("send_next", "recv_next") if rank == 0 else ("send_prev", "recv_prev")
        transfers = begins(seen, "p2p")
        assert sum(a[sends] for a in transfers) == sum(a[receives] for a in transfers) == 4
        assert all((a["bytes"] > 0) == (a["send_next"] or a["send_prev"]) for a in transfers)
        syncs = [a for a in begins(seen, "collective") if a["group"] == "dp"]
        assert {a["op"] for a in syncs} == {"start_grad_sync", "finish_grad_sync"}


def test_sequence_parallel_step():
    for seen in run_ranks(2, f"{HERE}:step", {"tp": 2}):
        check_nesting(seen)
        collectives = Counter((a["op"], a["group"]) for a in begins(seen, "collective"))
        # Per layer and micro-batch: two gathers forward, two again in backward, and as many sums.
        assert collectives["all_gather", "tp"] >= 4 * 2 * 4
        assert collectives["reduce_scatter", "tp"] >= 4 * 2 * 4
        assert collectives["layernorm_grads", "tp"] == 1
        assert collectives["start_param_sync", "dp"] >= 1
        assert [a["optimizer"] for a in begins(seen, "optimizer")] == ["DistributedOptimizer"]


def test_one_process_has_no_tensor_parallel_collectives():
    (seen,) = run_ranks(1, f"{HERE}:step", {})
    check_nesting(seen)
    assert not [a for a in begins(seen, "collective") if a["group"] == "tp" and "bytes" in a]
    assert len(begins(seen, "layer")) == 2 * 4


def exchange() -> list[Any]:
    """Forward and backward of one all-to-all, as MoE's token dispatcher calls it."""
    from megatron.core.tensor_parallel.mappings import all_to_all

    from mt_megatron.seams import events
    from tests.patches import small_gpt

    small_gpt.start()
    from megatron.core import parallel_state

    x = torch.arange(4.0).requires_grad_()
    seen: list[Any] = []
    stop = events.subscribe(lambda phase, name, attrs: seen.append([phase, name, dict(attrs)]))
    all_to_all(parallel_state.get_data_parallel_group(), x).sum().backward()
    stop()
    return seen


def test_all_to_all_is_seen_both_ways():
    for seen in run_ranks(2, f"{HERE}:exchange"):
        check_nesting(seen)
        assert [(a["op"], a["bytes"]) for a in begins(seen, "collective")] == [("all_to_all", 16)] * 2
