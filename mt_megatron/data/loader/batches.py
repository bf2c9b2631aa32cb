"""Which samples each data-parallel rank gets, in which order: a pure function of the samples consumed."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from mt_megatron.data.loader.datasets import SampleDataset
from mt_megatron.data.loader.queue_depth import watched
from mt_megatron.data.loader.shared_memory import PREFETCHED, exhausted
from mt_megatron.errors import DataError
from mt_megatron.layers.attention.packed_sequences import document_borders

Batch = dict[str, torch.Tensor]
"""``tokens``, ``labels``, ``position_ids`` int64 and ``loss_mask`` float32, each
[micro_batch_size, sequence_length]. When documents are kept apart also either ``attention_mask``
bool [micro_batch_size, 1, s, s], or ``cu_seqlens`` int32 [documents + 1], where they begin in the
micro-batch read row by row, and ``max_seqlen`` int64 [], the length of the longest.

Of masked words: ``text``, ``types``, ``labels``, ``loss_mask``, ``padding_mask`` int64
[micro_batch_size, sequence_length], ``is_random`` int64 [micro_batch_size]; the names are Megatron-Core's."""

_KEYS = (
    *("tokens", "labels", "loss_mask", "position_ids", "attention_mask"),
    *("text", "types", "padding_mask", "is_random"),
)
_PADDING = -1
_WORKER_ENDS_WITHIN = 1.0
"""Seconds from a closed connection to a worker until everything else that it had open is closed."""


class MicroBatchSampler(Sampler[list[int]]):
    """Sample indices of one rank's micro-batches.

    The ranks of a data-parallel group share the samples in order: every
    ``micro_batch_size * data_parallel_size`` consecutive samples are one micro-batch per rank. A
    global batch is therefore the same set of samples under every layout, and a run that resumes at
    ``consumed_samples`` sees exactly what the uninterrupted run would have seen.

    With ``pad_last`` the last, incomplete round is filled up with index -1 (a sample whose loss
    mask is zero), so that every sample is seen once and all ranks make the same number of steps;
    without it that round is left out.
    """

    def __init__(
        self,
        *,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        pad_last: bool = False,
    ) -> None:
        if micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            raise DataError(
                f"found micro_batch_size={micro_batch_size}, data-parallel rank {data_parallel_rank} of "
                f"{data_parallel_size}; expected a positive size and a rank within the group"
            )
        if consumed_samples < 0:
            raise DataError(f"found consumed_samples={consumed_samples}; expected 0 or more")
        self._total = total_samples
        self._consumed = consumed_samples
        self._micro = micro_batch_size
        self._round = micro_batch_size * data_parallel_size
        self._first = micro_batch_size * data_parallel_rank
        self._pad_last = pad_last

    def __len__(self) -> int:
        left = max(0, self._total - self._consumed)
        return -(-left // self._round) if self._pad_last else left // self._round

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            start = self._consumed + step * self._round + self._first
            yield [i if i < self._total else _PADDING for i in range(start, start + self._micro)]


def train_batches(
    dataset: SampleDataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """This rank's training micro-batches from ``consumed_samples`` on, on the host.

    With virtual pipeline stages make one iterator per model chunk; they yield the same batches.
    Raises ``DataError`` when the dataset has no samples left: it is built for a number of samples,
    and asking for more is a mistake in ``train_iters``, not a reason to start over silently.
    """
    sampler = MicroBatchSampler(
        total_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    yield from _load(dataset, sampler, num_workers, pin_memory)
    raise DataError(
        f"the training data of {len(dataset)} samples is used up (started at sample {consumed_samples}, "
        f"{micro_batch_size * data_parallel_size} samples a round); build the datasets with "
        "train_samples = train_iters * global_batch_size"
    )


def valid_batches(
    dataset: SampleDataset,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    max_samples: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """One pass over the first ``max_samples`` validation samples (None: all), each seen exactly once.

    Every rank yields ``valid_rounds(...)`` micro-batches; the last ones may hold samples whose loss
    mask is all zero, so weigh losses by ``loss_mask`` and sum over the data-parallel group.
    """
    sampler = MicroBatchSampler(
        total_samples=_limited(dataset, max_samples),
        consumed_samples=0,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        pad_last=True,
    )
    yield from _load(dataset, sampler, num_workers, pin_memory)


def valid_rounds(
    dataset: SampleDataset,
    *,
    micro_batch_size: int,
    data_parallel_size: int,
    max_samples: int | None = None,
) -> int:
    """How many micro-batches ``valid_batches`` yields on every rank."""
    return -(-_limited(dataset, max_samples) // (micro_batch_size * data_parallel_size))


def _limited(dataset: SampleDataset, max_samples: int | None) -> int:
    return len(dataset) if max_samples is None else min(len(dataset), max_samples)


def _load(
    dataset: SampleDataset, sampler: MicroBatchSampler, num_workers: int, pin_memory: bool
) -> Iterator[Batch]:
    view = _PaddedView(dataset)
    end = _document_end(dataset)
    if num_workers == 0 and not pin_memory:
        for indices in sampler:
            yield _collate([view[index] for index in indices], end=end)
        return
    # Its own generator: a DataLoader otherwise draws a seed from torch's global one, and dropout
    # would differ between a resumed and an uninterrupted run.
    loader: DataLoader[Batch | str] = DataLoader(
        view,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=partial(_collate_in_worker if num_workers else _collate, end=end),
        pin_memory=pin_memory,
        generator=torch.Generator(),
        prefetch_factor=PREFETCHED if num_workers else None,
        worker_init_fn=_end_at_a_lost_batch,
    )
    with _child_signal_kept():
        iterator = iter(loader)
    try:
        for batch in watched(iterator):
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch
    except (RuntimeError, EOFError, OSError) as error:
        gone = _ended_worker(iterator, error)
        if gone is None:
            raise
        raise DataError(
            f"{gone} The data itself may be fine: look for the kernel's out-of-memory killer, and use fewer "
            "--num-workers or 0. The run continues from its last checkpoint"
        ) from error


@contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Keep the handler of SIGCHLD, for which torch's loader puts its own.

    That one raises in whatever the main thread does when a worker ends, such as the middle of an
    update. The loader finds the end of a worker also by itself, when it waits for a batch.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)


def _ended_worker(iterator: object, error: Exception) -> str | None:
    """Which worker's end ``error`` comes from, as a sentence; None if it has another reason.

    torch itself says so in a ``RuntimeError`` with the worker's process id, but not how it ended. When
    a worker ends while the loader fetches a tensor from it, the connection's own error comes first and
    names nobody.
    """
    said = str(error) if isinstance(error, RuntimeError) else None
    if said is not None and "DataLoader worker (pid" not in said:
        return None
    running: dict[Any, BaseProcess] = {each.sentinel: each for each in getattr(iterator, "_workers", [])}
    deadline = time.monotonic() + _WORKER_ENDS_WITHIN
    while ended := wait(list(running), timeout=max(0.0, deadline - time.monotonic())):
        for sentinel in ended:
            worker = running.pop(sentinel)
            # What it had open closes a moment before the process itself is over.
            worker.join()
            if code := worker.exitcode:
                by = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                by += " (SIGBUS, as of a full /dev/shm)" if code == -signal.SIGBUS else ""
                return f"DataLoader worker (pid {worker.pid}) ended {by}."
    return said


def _document_end(dataset: SampleDataset) -> int | None:
    """The token that ends documents when they are to be kept apart and the samples hold no mask."""
    config: Any = getattr(dataset, "config", None)
    if not getattr(config, "reset_attention_mask", False) or config.create_attention_mask:
        return None
    return int(config.tokenizer.eod)


class _PaddedView(Dataset[dict[str, torch.Tensor]]):
    """The dataset, with index -1 standing for a sample that counts for nothing."""

    def __init__(self, dataset: SampleDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index != _PADDING:
            return self._dataset[index]
        sample = dict(self._dataset[0])
        sample["loss_mask"] = 0 * sample["loss_mask"]
        return sample


def _collate(samples: Sequence[dict[str, Any]], *, end: int | None) -> Batch:
    # Those of masked words are numbers and numpy's arrays.
    batch = {
        key: torch.stack([torch.as_tensor(sample[key]) for sample in samples])
        for key in _KEYS
        if key in samples[0]
    }
    if end is not None:
        batch["cu_seqlens"] = document_borders(batch["tokens"], end)
        batch["max_seqlen"] = batch["cu_seqlens"].diff().max().long()
    return batch


def _collate_in_worker(samples: Sequence[dict[str, Any]], *, end: int | None) -> Batch | str:
    """The batch in shared memory, or why it cannot be there."""
    batch = _collate(samples, end=end)
    try:
        # Not in the queue's thread, where an error loses the batch and the trainer waits for it without end.
        for tensor in batch.values():
            tensor.share_memory_()
    except (RuntimeError, OSError) as error:
        nbytes = sum(tensor.nbytes for tensor in batch.values())
        return exhausted(error, nbytes, masked="attention_mask" in batch)
    return batch


def _end_at_a_lost_batch(worker: int) -> None:
    """Let this worker end where its queue's thread loses a batch: an end the trainer hears of."""

    def end(error: Exception, batch: Any) -> None:
        traceback.print_exception(error)
        os._exit(1)

    Queue._on_queue_feeder_error = staticmethod(end)  # type: ignore[attr-defined]
