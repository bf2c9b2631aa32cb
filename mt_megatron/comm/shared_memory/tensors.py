"""Tensors of the host as bytes, and bytes as tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mt_megatron.comm.errors import TransportError
from mt_megatron.comm.transport import Edge
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
    if tensor.is_contiguous():
        return tensor
    # Not every dtype has a kernel that copies: its bits do.
    bits = _BITS.get(tensor.dtype.itemsize, tensor.dtype)
    return tensor.view(bits).contiguous().view(tensor.dtype)


def is_in_rows(tensor: Tensor) -> bool:
    """Whether the storage holds the elements as they are, in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Unwritten:
    """Notices that a tensor was written to in place between its post and the copy of it.

    Autograd's version counter tells: views and ``detach`` share it, an exchanged ``.data`` keeps it. What was
    written through numpy or another library, and tensors of inference mode, it does not see.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = _version(tensor)

    def require(self, edge: Edge) -> None:
        """Raises TransportError if it was."""
        now = _version(self._tensor)
        if now != self._version:
            raise TransportError(
                f"a tensor of shape {tuple(self._tensor.shape)} was written to in place "
                f"{now - self._version} time(s) between its post to rank {edge.target} and the copy of it, "
                "so that the receiver may have got either value; expected it unchanged until its handle was "
                "waited for, or the step is over. Send a copy (tensor.clone()), or take --p2p-transport "
                "collective"
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
