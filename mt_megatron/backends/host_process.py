"""How a training process uses its host: threads from the cores per rank, and freed memory that is kept."""

from __future__ import annotations

import ctypes
import logging
import os
import sys

import torch

from mt_megatron.host import limits

logger = logging.getLogger("mt_megatron")

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_DEFAULT_MMAP_MAX = 65536


def cores_per_rank(local_ranks: int) -> int:
    """Processors that this process may keep busy, shared out among the ranks of this node; at least 1."""
    return max(1, limits.processors() // max(1, local_ranks))


def set_threads(asked: int | None = None) -> int:
    """Set torch's threads to ``asked``, by default to the cores per rank. Returns their number.

    ``OMP_NUM_THREADS`` is left as the user's word, unless it is the 1 that torchrun sets for several
    ranks when nobody has said anything.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    said = os.environ.get("OMP_NUM_THREADS")
    by_torchrun = said == "1" and ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if asked is None and said is not None and not by_torchrun:
        return torch.get_num_threads()
    threads = cores_per_rank(ranks) if asked is None else asked
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        logger.info("%d thread(s) for this process: %d rank(s) on this node", threads, ranks)
    return threads


def keep_freed_memory(keep: bool = True) -> bool:
    """Let the C library keep what is freed instead of giving it back to the system and asking again.

    A step allocates the same tensors as the one before; returned pages have to be cleared by the
    kernel each time they come back, which took a fifth of a step's processor time. ``False`` maps
    large tensors again, as the default is. Returns whether the C library is glibc, which alone has
    this switch.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    done: bool = mallopt(_MMAP_MAX, 0 if keep else _DEFAULT_MMAP_MAX) == 1
    if keep:
        # -1: the heap never shrinks.
        done = mallopt(_TRIM_THRESHOLD, -1) == 1 and mallopt(_TOP_PAD, 64 << 20) == 1 and done
    return done
