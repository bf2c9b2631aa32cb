"""A memory-mapped file as tensors: read on first use, and its memory can be released after use."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from mt_megatron.errors import CheckpointError

_PAGE = mmap.PAGESIZE


class MappedFile:
    """One file in the address space of this process."""

    def __init__(self, path: Path) -> None:
        """Raises ``CheckpointError`` when the file cannot be read."""
        self.path = path
        try:
            with open(path, "rb") as stream:
                # torch takes writable memory only; copy-on-write, so that the file stays as it is.
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Give a complete copy of it") from error
        self.size = len(self._map)

    def bytes(self, offset: int, length: int) -> bytes:
        """A copy of ``length`` bytes from ``offset``."""
        return self._map[offset : offset + length]

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The contiguous tensor that lies at ``offset``: a view of the file, not to be written to.

        Raises ``CheckpointError`` when the file ends before it.
        """
        count = 1
        for each in shape:
            count *= each
        length = count * dtype.itemsize
        if offset < 0 or offset + length > self.size:
            raise CheckpointError(
                f"{self.path} has {self.size} bytes and a tensor of {length} at {offset}: it was cut short. "
                "Give a complete copy of it"
            )
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def release(self, offset: int, length: int) -> None:
        """Take the pages that lie wholly in a region out of this process; they are read anew if needed."""
        start = -(-offset // _PAGE) * _PAGE
        stop = (offset + length) // _PAGE * _PAGE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
