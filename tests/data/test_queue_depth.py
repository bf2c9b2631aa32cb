"""How many micro-batches lie ready is told where workers make them ahead, and nowhere else."""

from __future__ import annotations

import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

from mt_megatron.data.loader.queue_depth import micro_batches_ready, watched


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


class _Iterator:
    """Stands for that of a loader without workers."""


def test_a_loader_may_begin_while_another_thread_counts() -> None:
    failed: list[BaseException] = []
    counts = [0]
    over = threading.Event()

    def count() -> None:
        try:
            while not over.is_set():
                micro_batches_ready()
                counts[0] += 1
        except RuntimeError as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    counting = threading.Thread(target=count)
    counting.start()
    try:
        while counts[0] < 20_000 and not failed:
            kept = [_Iterator() for _ in range(50)]
            for each in kept:
                watched(each)  # type: ignore[arg-type]
    finally:
        over.set()
        counting.join()
        sys.setswitchinterval(interval)
    assert failed == []
