"""Shared memory that data loader workers need for their batches, against the size of ``/dev/shm``."""

from __future__ import annotations

import mmap

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.host import limits

PREFETCHED = 4
"""Micro-batches that each worker keeps ready, so that a step does not wait for a slow read."""

_MIB = 2**20


def micro_batch_bytes(config: TrainingConfig) -> int:
    """Bytes of one micro-batch in shared memory, where each tensor has whole pages."""
    size, length = config.train.micro_batch_size, config.train.seq_length or 0
    # Tokens, labels, positions and a mask of the loss; of masked words five tensors of numbers.
    widths = (8, 8, 8, 8, 8) if config.model.masked_words else (8, 8, 8, 4)
    tensors = [size * length * width for width in widths]
    if config.data.reset_attention_mask:
        # A mask, or where documents begin (at least 0 and the end) and the longest one's length.
        tensors += [size * length * length] if config.data.packed_sequences is False else [8, 8]
    return sum(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for nbytes in tensors)


def shared_memory_problem(config: TrainingConfig, local_ranks: int) -> str | None:
    """Found, expected and what to change, where ``/dev/shm`` of this machine cannot hold the batches that the
    workers of its ``local_ranks`` ranks keep ready; None where it can, or without workers."""
    workers, space = config.data.num_workers, limits.shared_memory()
    if workers < 1 or space is None:
        return None
    loaders = local_ranks * (config.virtual_pipeline_model_parallel_size or 1)
    each = micro_batch_bytes(config)
    # And the one that the rank works on.
    need = loaders * (workers * PREFETCHED + 1) * each
    if need <= space.available:
        return None
    return (
        f"data loader workers need {need / _MIB:.1f} MiB of /dev/shm ({loaders} loader(s) x "
        f"({workers} worker(s) x {PREFETCHED} micro-batches + 1) x {each / _MIB:.2f} MiB), and it has "
        f"{space.available / _MIB:.1f} of {space.total / _MIB:.1f} MiB free; expected as much. "
        f"{advice(config.data.packed_sequences is False)}"
    )


def advice(masked: bool) -> str:
    """What to change. ``masked``: the batches hold an attention mask."""
    mask = "leave --no-packed-sequences out, " if masked else ""
    return (
        f"Give /dev/shm more (docker run --shm-size, launch --shared-memory for Kubernetes, mount -o "
        f"remount,size=), {mask}or use fewer --num-workers, 0 for none"
    )


def exhausted(error: Exception, nbytes: int, *, masked: bool) -> str:
    """What a worker says that cannot share a batch of ``nbytes`` for ``error``."""
    space = limits.shared_memory()
    state = "it is not mounted"
    if space is not None:
        state = f"{space.available / _MIB:.1f} of {space.total / _MIB:.1f} MiB are free"
    return (
        f"a data loader worker cannot put a micro-batch of {nbytes / _MIB:.2f} MiB into /dev/shm: {error} "
        f"({state}); expected room for {PREFETCHED} of each worker. {advice(masked)}"
    )
