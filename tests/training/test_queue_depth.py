"""How many micro-batches lie ready is told where workers make them ahead, and nowhere else."""

from __future__ import annotations

import time

import torch
from torch.utils.data import DataLoader, Dataset

from mt_megatron.training.data.queue_depth import micro_batches_ready, watched


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_what_workers_have_ready_is_counted_while_the_loader_lives() -> None:
    assert micro_batches_ready() is None
    without_workers = watched(iter(DataLoader(_Numbers(), batch_size=2)))
    assert micro_batches_ready() is None
    loader = DataLoader(_Numbers(), batch_size=2, num_workers=1, prefetch_factor=4)
    iterator = watched(iter(loader))
    next(iterator)
    deadline = time.monotonic() + 60
    # One was taken, and the worker may be four ahead.
    while micro_batches_ready() != 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert micro_batches_ready() == 4
    del iterator
    assert micro_batches_ready() is None
    assert list(without_workers)[0].tolist() == [0, 1]
