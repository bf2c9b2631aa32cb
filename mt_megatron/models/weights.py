"""The row of a conversion table: one Megatron tensor and the published tensors it is packed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Packing = Literal["same", "stacked", "query_groups"]


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """Where one Megatron tensor comes from. ``{layer}`` in a name stands for the layer's index."""

    sources: tuple[str, ...]
    """Published names, in packing order."""

    packing: Packing = "same"
    """
    * ``same``: the tensor itself.
    * ``stacked``: concatenated along dimension 0 (``fc1`` is gate over up).
    * ``query_groups``: query, key and value, interleaved so that each query group holds its own
      query heads, then its key head, then its value head.
    """

    vocabulary: bool = False
    """Whether dimension 0 is the vocabulary, which Megatron pads."""
