"""A training step tells listeners what begins and ends, and pairs every begin with its end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests.launch import run_ranks

HERE = "tests.patches.events.test_emitters"


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
        for direction in ("forward", "backward"):
            numbers = [a["microbatch"] for a in begins(seen, "microbatch") if a["direction"] == direction]
            assert numbers == [a["microbatch"] for a in begins(seen, direction)] == [0, 1, 2, 3]
        assert [a["optimizer"] for a in begins(seen, "optimizer")] == ["FP32Optimizer"]
        sends, receives = ("send_next", "recv_next") if rank == 0 else ("send_prev", "recv_prev")
        transfers = begins(seen, "p2p")
        assert sum(a[sends] for a in transfers) == sum(a[receives] for a in transfers) == 4
        assert all((a["bytes"] > 0) == (a["send_next"] or a["send_prev"]) for a in transfers)
        # The other stage's rank is the only one beside this: the groups of one rank communicate nothing.
        assert all(a["ranks"] == [0, 1] for a in begins(seen, "collective"))
    for one, other, peer in ((first, last, 1), (last, first, 0)):
        sent = [t[2:] for a in begins(one, "p2p") for t in a["transfers"] if t[:2] == ["send", peer]]
        received = [
            t[2:] for a in begins(other, "p2p") for t in a["transfers"] if t[:2] == ["recv", 1 - peer]
        ]
        assert sent == received == [[seq, 8 * 2 * 32 * 4] for seq in range(4)]


def test_sequence_parallel_step():
    for seen in run_ranks(2, f"{HERE}:step", {"tp": 2}):
        check_nesting(seen)
        collectives = Counter((a["op"], a["group"]) for a in begins(seen, "collective"))
        # Per layer and micro-batch: two gathers forward, two again in backward, and as many sums.
        assert collectives["all_gather", "tp"] >= 4 * 2 * 4
        assert collectives["reduce_scatter", "tp"] >= 4 * 2 * 4
        # The norms' gradients, once, after all micro-batches; the norm of all of them, over all ranks.
        after = [e for e in _outside(seen, "microbatch") if e["op"] == "all_reduce"]
        assert [(a["group"], a["bytes"] > 8) for a in after] == [("tp", True), ("world", False)]
        assert [a["optimizer"] for a in begins(seen, "optimizer")] == ["DistributedOptimizer"]


def _outside(seen: list[Any], name: str) -> list[dict[str, Any]]:
    """Attributes of the collectives that begin while no ``name`` is open."""
    found, depth = [], 0
    for phase, event, attrs in seen:
        if event == name:
            depth += 1 if phase == "begin" else -1
        elif (phase, event) == ("begin", "collective") and depth == 0:
            found.append(attrs)
    return found


def test_one_process_has_no_collectives():
    (seen,) = run_ranks(1, f"{HERE}:step", {})
    check_nesting(seen)
    assert begins(seen, "collective") == begins(seen, "p2p") == []
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
        said = [(a["op"], a["group"], a["seq"], a["bytes"]) for a in begins(seen, "collective")]
        assert said == [("all_to_all", "dp", 0, 16), ("all_to_all", "dp", 1, 16)]
