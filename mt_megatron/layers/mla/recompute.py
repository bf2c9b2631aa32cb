"""What a region saves for backward is made again instead, where it is one of some known tensors.

For MLA's queries, keys and values: many heads of them are projected from latents that are an order of
magnitude smaller and are kept anyway. DeepSeek-V3 trains so (arXiv:2412.19437, section 3.2.3).
Unlike a checkpoint of the projections, this runs them once more and not their backward preparation,
and unlike a checkpoint of the attention it does not attend again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A view of one of the tensors that are made again."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Recomputation:
    """Stands for ``tensors`` between forward and backward; ``again()`` gives equal ones in that order."""

    def __init__(self, tensors: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> None:
        places = ((t.untyped_storage().data_ptr(), index) for index, t in enumerate(tensors))
        # A tensor type without memory of its own says 0; its parts cannot be told apart.
        self._index = {place: index for place, index in places if place}
        self._again = again
        self._found: Sequence[Tensor] | None = None
        self._asked = 0
        kind = tensors[0].device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.left_out = 0
        """How many saved tensors were not kept because of this."""

    @contextmanager
    def in_place_of_saving(self) -> Iterator[None]:
        """Within it nothing that lies in the memory of ``tensors`` is kept for backward."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        index = self._index.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return tensor
        self.left_out += 1
        return _Part(
            index=index, size=tensor.size(), stride=tensor.stride(), offset=int(tensor.storage_offset())
        )

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Part):
            kept: Tensor = packed
            return kept
        if self._found is None:
            with torch.no_grad(), self._as_in_forward():
                self._found = self._again()
        part = self._found[packed.index].as_strided(packed.size, packed.stride, packed.offset)
        self._asked += 1
        if self._asked == self.left_out:
            # Everything was asked for: another backward pass makes them once more.
            self._found, self._asked = None, 0
        return part

    def _as_in_forward(self) -> AbstractContextManager[Any]:
        kind, dtype, enabled = self._autocast
        if not enabled and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, dtype=dtype, enabled=enabled)
