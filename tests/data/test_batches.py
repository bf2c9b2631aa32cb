"""Micro-batches: every sample once, the same global batches under every layout, exact resume."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from mt_megatron.data.loader.batches import MicroBatchSampler, train_batches, valid_batches, valid_rounds
from mt_megatron.errors import DataError


class Numbered:
    """Sample i is the number i, four times."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        assert 0 <= index < self.count
        return {
            "tokens": torch.full((4,), index),
            "labels": torch.full((4,), index + 1),
            "loss_mask": torch.ones(4),
            "position_ids": torch.arange(4),
            "dataset_id": torch.tensor(0),
        }


def _train(rank: int, size: int, micro: int, consumed: int, count: int, samples: int = 48) -> list[list[int]]:
    batches = train_batches(
        Numbered(samples),
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=size,
    )
    return [batch["tokens"][:, 0].tolist() for batch in islice(batches, count)]


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (2, 4), (3, 4)])
def test_a_global_batch_is_the_same_samples_under_every_layout(size: int, micro: int) -> None:
    global_batch = 24
    per_rank = global_batch // (size * micro)
    for step in range(2):
        start = step * global_batch
        seen = sorted(
            i for rank in range(size) for batch in _train(rank, size, micro, start, per_rank) for i in batch
        )
        assert seen == list(range(start, start + global_batch))


@pytest.mark.parametrize("size", [1, 2])
def test_resume_continues_exactly(size: int) -> None:
    for rank in range(size):
        whole = _train(rank, size, 2, 0, 12 // size)
        done = 5 * 2 * size
        assert _train(rank, size, 2, done, 12 // size - 5) == whole[5:]


def test_batch_types_and_shapes() -> None:
    batch = next(
        train_batches(
            Numbered(8), consumed_samples=0, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1
        )
    )
    assert {key: (value.dtype, tuple(value.shape)) for key, value in batch.items()} == {
        "tokens": (torch.int64, (2, 4)),
        "labels": (torch.int64, (2, 4)),
        "loss_mask": (torch.float32, (2, 4)),
        "position_ids": (torch.int64, (2, 4)),
    }


def test_used_up_data_is_an_error_not_a_silent_restart() -> None:
    with pytest.raises(DataError, match="used up"):
        _train(0, 1, 4, 40, 3)


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_validation_counts_every_sample_once_and_ranks_keep_step(samples: int, size: int) -> None:
    seen: list[int] = []
    rounds = valid_rounds(Numbered(samples), micro_batch_size=2, data_parallel_size=size)
    for rank in range(size):
        batches = list(
            valid_batches(
                Numbered(samples), micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=size
            )
        )
        assert len(batches) == rounds
        for batch in batches:
            counted = batch["loss_mask"].bool().all(dim=1)
            assert torch.equal(batch["loss_mask"].bool().any(dim=1), counted)
            seen += batch["tokens"][counted, 0].tolist()
    assert sorted(seen) == list(range(samples))


def test_validation_stops_at_max_samples() -> None:
    batches = list(
        valid_batches(
            Numbered(9), micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1, max_samples=5
        )
    )
    assert (
        len(batches)
        == valid_rounds(Numbered(9), micro_batch_size=2, data_parallel_size=1, max_samples=5)
        == 3
    )
    assert sum(int(batch["loss_mask"].sum()) for batch in batches) == 5 * 4


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_draws_nothing_from_the_global_generator(workers: int) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batches = train_batches(
        Numbered(12),
        consumed_samples=4,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=workers,
    )
    assert [b["tokens"][:, 0].tolist() for b in islice(batches, 4)] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert torch.equal(torch.get_rng_state(), before)


def test_impossible_ranks_and_sizes_are_refused() -> None:
    good = {
        "total_samples": 4,
        "consumed_samples": 0,
        "micro_batch_size": 1,
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
    }
    for change in ({"data_parallel_rank": 1}, {"micro_batch_size": 0}, {"consumed_samples": -1}):
        with pytest.raises(DataError, match="expected"):
            MicroBatchSampler(**{**good, **change})
