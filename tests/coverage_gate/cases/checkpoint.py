"""Distributed checkpoints: every strategy writes and reads, and each exchange gives the same tensors."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder that both ranks see, gone afterwards."""
    rank = torch.distributed.get_rank()
    holder = [tempfile.mkdtemp(prefix="mt_megatron_gate_") if rank == 0 else ""]
    torch.distributed.broadcast_object_list(holder, src=0)
    try:
        yield Path(holder[0])
    finally:
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(holder[0])


def _value(name: str, rank: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32).reshape(2, 3) + 100 * rank + len(name)


def _state(filled: bool) -> dict[str, Any]:
    """One tensor cut in two by rank, three that both ranks hold, a bf16 one, a plain value."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank = torch.distributed.get_rank()

    def tensor(name: str, owner: int) -> torch.Tensor:
        value = _value(name, owner)
        return value if filled else torch.full_like(value, -1)

    state: dict[str, Any] = {"cut": ShardedTensor.from_rank_offsets("cut", tensor("cut", rank), (0, rank, 2))}
    for name in ("shared", "shared2", "shared_three"):
        state[name] = ShardedTensor.from_rank_offsets(name, tensor(name, 0), replica_id=rank)
    half = tensor("half", 0).bfloat16()
    state["half"] = ShardedTensor.from_rank_offsets("half", half, replica_id=rank)
    if filled:
        state["iteration"] = 7
    return state


def _check(loaded: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    assert torch.equal(loaded["cut"], _value("cut", rank))
    for name in ("shared", "shared2", "shared_three"):
        assert torch.equal(loaded[name], _value(name, 0)), name
    assert torch.equal(loaded["half"], _value("half", 0).bfloat16())
    assert all(loaded[name].device.type == DEVICE for name in ("cut", "shared", "half"))


@case(world=2)
def torch_format_with_parallel_save_and_every_exchange() -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    group = parallel_state.get_data_parallel_group()
    with _shared_folder() as folder:
        save = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist", 1), group)
        dist_checkpointing.save(_state(True), str(folder), save)
        loaded = dist_checkpointing.load(_state(False), str(folder))
        _check(loaded)
        assert loaded["iteration"] == 7
        for algorithm in ("broadcast", "gather_rounds", "gather_object"):
            load = FullyParallelLoadStrategyWrapper(
                TorchDistLoadShardedStrategy(), group, exchange_algo=algorithm
            )
            _check(dist_checkpointing.load(_state(False), str(folder), load))


@case(world=2)
def asynchronous_save_is_finished_on_all_ranks() -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    with _shared_folder() as folder:
        state = _state(True)
        queue = AsyncCallsQueue()
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        assert queue.schedule_async_request(request) == 0
        # Training goes on meanwhile: what it writes into a parameter must not reach the file.
        for value in state.values():
            if hasattr(value, "data") and isinstance(value.data, torch.Tensor):
                value.data.fill_(-5)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        assert queue.get_num_unfinalized_calls() == 0
        _check(dist_checkpointing.load(_state(False), str(folder)))


@case(world=2)
def zarr_format_read_in_two_stages() -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
    from megatron.core.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

    with _shared_folder() as folder:
        save = get_default_strategy(StrategyAction.SAVE_SHARDED, "zarr", 1)
        dist_checkpointing.save(_state(True), str(folder), save)
        for through_the_host in (False, True):
            load = TwoStageDataParallelLoadShardedStrategy(
                parallel_state.get_data_parallel_group(), cpu_transfer=through_the_host
            )
            _check(dist_checkpointing.load(_state(False), str(folder), load))


@case(world=2)
def load_times_are_summed_up_over_ranks() -> None:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import two_stage

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, level = Keep(), two_stage.logger.level
    two_stage.logger.addHandler(handler)
    two_stage.logger.setLevel(logging.INFO)
    two_stage.timers.clear()
    two_stage.timers["read"].append(1.0 + torch.distributed.get_rank())
    try:
        strategy = two_stage.TwoStageDataParallelLoadShardedStrategy(parallel_state.get_data_parallel_group())
        strategy.summarize_load_times()
    finally:
        two_stage.timers.clear()
        two_stage.logger.setLevel(level)
        two_stage.logger.removeHandler(handler)
    if torch.distributed.get_rank() == 0:
        assert "read: max 2.0, avg 1.5" in lines, lines


@case(world=1)
def buffers_for_the_exchange_of_shards() -> None:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.exchange_utils import _get_empty_tensor_for_exchange

    def shard(data: bool) -> Any:
        made = ShardedTensor.from_rank_offsets("x", torch.ones(2, 3, dtype=torch.bfloat16))
        return made if data else made.without_data()

    kept: dict[Any, torch.Tensor] = {}
    name = ("x", (0, 0), None)
    for unneeded in (shard(False), shard(True)):
        tensor, device = _get_empty_tensor_for_exchange(name, {}, {name: unneeded}, kept)
        assert device is None and kept == {}
        assert tensor.shape == (2, 3) and tensor.dtype == torch.bfloat16 and tensor.device.type == DEVICE
    tensor, device = _get_empty_tensor_for_exchange(name, {name: shard(False)}, {}, kept)
    assert kept[name] is tensor and device.type == DEVICE and tensor.shape == (2, 3)
    # Shards whose data is on the host are exchanged through the device.
    on_host = ShardedTensor.from_rank_offsets("x", torch.ones(2, 3, device="cpu"))
    tensor, _ = _get_empty_tensor_for_exchange(name, {}, {name: on_host}, kept)
    assert tensor.device.type == DEVICE
    tensor, device = _get_empty_tensor_for_exchange(name, {name: on_host}, {}, kept)
    assert device.type == "cpu" and kept[name] is tensor and tensor.device.type == DEVICE


@case(world=1)
def state_dict_for_a_local_checkpoint() -> None:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_transformation import (
        prepare_state_dict_for_save,
        recreate_state_dict_after_load,
    )

    def state(value: float) -> dict[str, Any]:
        data = torch.full((2, 2), value)
        return {"a": ShardedTensor.from_rank_offsets("a", data), "step": 3}

    saved = prepare_state_dict_for_save(state(4.0))
    loaded = recreate_state_dict_after_load(state(0.0), saved)
    assert torch.equal(loaded["a"], torch.full((2, 2), 4.0)) and loaded["a"].device.type == DEVICE
    assert loaded["step"] == 3
