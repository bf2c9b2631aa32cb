"""Bytes of weights, gradients and optimizer state on one rank, as Megatron-Core 0.9.0 allocates them.

Padding and buckets: ``parallel/gradient_buckets.py``. Upstream: ``optimizer/optimizer.py`` and
``optimizer/distrib_optimizer.py`` (what is kept in fp32).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from mt_megatron.parallel.gradient_buckets import Bucket, buckets_of
from mt_megatron.planning.parameter_tensors import ParameterTensor

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """Options that decide how much is kept for each parameter."""

    parameter_bytes: int
    """Bytes of one weight: 2 for bf16 and fp16, 4 for fp32."""

    gradient_bytes: int
    """Bytes of one accumulated gradient: 4 with ``grad_reduce_in_fp32``, else those of a weight."""

    adam: bool = True
    """Adam keeps two moments; SGD with momentum keeps one."""

    momentum: bool = True
    """Whether SGD keeps a momentum buffer."""

    distributed: bool = False
    """Whether optimizer state is spread over the data-parallel ranks."""

    overlap_grad_reduce: bool = False
    """Whether gradients are divided into buckets (on the first stage's first chunk alone)."""

    bucket_size: int | None = None
    """Elements of a bucket; None: 40 million, or a million per data-parallel rank if that is more."""

    @property
    def master_bytes(self) -> int:
        """Bytes of one fp32 master weight: none in fp32, where the weight is its own."""
        return _FP32 if self.parameter_bytes < _FP32 else 0

    @property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments for one parameter; they are fp32."""
        return 2 * _FP32 if self.adam else _FP32 * int(self.momentum)


@dataclass(frozen=True, kw_only=True)
class ParameterMemory:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    def __add__(self, other: ParameterMemory) -> ParameterMemory:
        return ParameterMemory(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )

    @property
    def total(self) -> int:
        """All three together."""
        return self.weights + self.gradients + self.optimizer


NOTHING = ParameterMemory(weights=0, gradients=0, optimizer=0)


def chunk_state_memory(
    tensors: Sequence[ParameterTensor],
    options: StateOptions,
    *,
    data_parallel: int,
    expert_data_parallel: int | None = None,
    bucketed: bool = False,
    rank: int | None = None,
    expert_rank: int | None = None,
) -> ParameterMemory:
    """Bytes for one model chunk on data-parallel rank ``rank``, which is ``expert_rank`` of those that
    share its experts, or on the one that has most.

    ``data_parallel`` counts context-parallel ranks too, since gradients are reduced and state is spread
    over both; ``expert_data_parallel`` is that of expert parameters (the same when None).
    ``bucketed`` says that this is the chunk whose gradients are divided into buckets.
    """
    total = NOTHING
    for expert in (False, True):
        group = [tensor for tensor in tensors if tensor.expert is expert]
        apart = expert and expert_data_parallel is not None
        ranks = expert_data_parallel if apart and expert_data_parallel else data_parallel
        index = expert_rank if apart else rank
        if group:
            size = _bucket_size(options, data_parallel, bucketed)
            total += _buffer_memory(group, options, ranks, size, index)
    return total


def _bucket_size(options: StateOptions, data_parallel: int, bucketed: bool) -> int | None:
    if not (bucketed and options.overlap_grad_reduce):
        return None
    return options.bucket_size or max(40_000_000, 1_000_000 * data_parallel)


def _buffer_memory(
    tensors: Sequence[ParameterTensor],
    options: StateOptions,
    data_parallel: int,
    bucket_size: int | None,
    rank: int | None,
) -> ParameterMemory:
    kept = options.master_bytes + options.moment_bytes
    if not options.distributed:
        elements = sum(tensor.numel for tensor in tensors)
        return ParameterMemory(
            weights=elements * options.parameter_bytes,
            gradients=elements * options.gradient_bytes,
            optimizer=elements * kept,
        )
    placed = [(tensor.numel, tensor.shared_embedding) for tensor in reversed(tensors)]
    buckets = buckets_of(placed, data_parallel, bucket_size)
    padded = buckets[-1].end
    owned = _largest_share(buckets, data_parallel) if rank is None else _owned(buckets, data_parallel, rank)
    return ParameterMemory(
        weights=padded * options.parameter_bytes,
        gradients=padded * options.gradient_bytes,
        optimizer=owned * kept,
    )


def _owned(buckets: Sequence[Bucket], data_parallel: int, rank: int) -> int:
    """Parameter elements (no padding) in ``rank``'s share of every bucket."""
    owned = 0
    for bucket in buckets:
        # Spans ascend: only those that reach into the share are looked at.
        starts, ends = [a for a, _ in bucket.spans], [b for _, b in bucket.spans]
        share = (bucket.end - bucket.start) // data_parallel
        low, high = bucket.start + rank * share, bucket.start + (rank + 1) * share
        near = slice(bisect_right(ends, low), bisect_left(starts, high))
        owned += sum(max(0, min(high, b) - max(low, a)) for a, b in bucket.spans[near])
    return owned


def _largest_share(buckets: Sequence[Bucket], data_parallel: int) -> int:
    # Shares differ by padding alone; with many ranks the padded share says the same.
    if data_parallel <= 8:
        return max(_owned(buckets, data_parallel, rank) for rank in range(data_parallel))
    return sum((bucket.end - bucket.start) // data_parallel for bucket in buckets)
