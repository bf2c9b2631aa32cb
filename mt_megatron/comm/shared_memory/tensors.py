"""Tensors of the host as bytes, and bytes as tensors."""

from __future__ import annotations

import ctypes
import warnings
import weakref

import torch
from torch import Tensor

from mt_megatron.comm.errors import TransportError
from mt_megatron.errors import MtMegatronError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_rows(tensor: Tensor) -> Tensor:
    """``tensor`` with its elements in row-major order, sharing storage where they already are; it is no
    alias of the Python object, whose ``.data`` may be exchanged. Raises MtMegatronError for a tensor that is
    not strided."""
    if tensor.layout is not torch.strided:
        raise MtMegatronError(
            f"found a tensor of layout {tensor.layout} to send; expected a dense one; send tensor.to_dense()"
        )
    if is_in_rows(tensor):
        return tensor.detach()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else copy_of(tensor)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in rows."""
    # Not every dtype has a kernel that copies: its bits do.
    bits = _BITS.get(tensor.dtype.itemsize, tensor.dtype)
    return tensor.view(bits).clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def is_in_rows(tensor: Tensor) -> bool:
    """Whether the storage holds the elements as they are, in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_part(tensor: Tensor) -> bool:
    """True where the storage holds more than ``tensor``, such as other rows of a buffer."""
    return tensor.untyped_storage().nbytes() != tensor.nbytes


class Unwritten:
    """Guard against in-place writes to a tensor between its post and the copy of it.

    Autograd's version counter counts them: views and ``detach`` share it, an exchanged ``.data`` keeps it. It
    counts writes anywhere in a storage, so a part of one (``is_part``) is copied at its post instead. Writes
    by ``.data``, numpy or another library are not counted, nor those to tensors of inference mode.
    """

    def __init__(self, tensor: Tensor, posted: Tensor) -> None:
        """``tensor``: an alias of ``posted`` that keeps its storage."""
        self._tensor = tensor
        self._version = _version(tensor)
        self._posted = weakref.ref(posted)

    def require(self, target: int) -> None:
        """Raise TransportError if the storage was written to; ``target``: the rank that it goes to."""
        times = _version(self._tensor) - self._version
        if not times:
            return
        found = (
            f"a tensor of shape {tuple(self._tensor.shape)} was written to in place {times} time(s) between "
            f"its post to rank {target} and the copy of it"
        )
        posted = self._posted()
        if posted is not None and posted.data_ptr() != self._tensor.data_ptr():
            # The counter goes on with the new storage: the write may be there, where it does no harm.
            warnings.warn(f"{found}; its .data was exchanged, so what was sent may be right", stacklevel=2)
            return
        raise TransportError(
            f"{found}, so that the receiver may have got either value; expected it unchanged until its "
            "handle was waited for, or the step is over. Send a copy (tensor.clone()), or take "
            "--p2p-transport collective"
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a host tensor in rows; writable. The tensor must outlive it."""
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())).cast("B")


def tensor_over(memory: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose storage is ``memory``, which it keeps."""
    if not len(memory):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
