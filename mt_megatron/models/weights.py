"""The row of a conversion table: one Megatron tensor and the published tensors it is packed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Packing = Literal["same", "stacked", "query_groups"]


@dataclass(frozen=True, kw_only=True)
class RotaryRows:
    """Rows that the two sides order differently: the published ones are half-rotated (all first halves
    of the pairs, then all second halves), Megatron's are interleaved (pair after pair)."""

    block: int
    """Rows of one head."""

    size: int
    """The first ``size`` rows of each block are rotated; the rest are left where they are."""


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """Where one Megatron tensor comes from. ``{layer}`` in a name stands for the layer's index in the
    whole model, ``{expert}`` for the expert's."""

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

    layers: tuple[int, ...] | None = None
    """The layers that have this tensor; None: every layer of the decoder."""

    experts: int = 1
    """How many experts ``{expert}`` stands for."""

    copies: tuple[str, ...] = ()
    """Published tensors that repeat this one. They may be absent; read, they must be equal."""

    writes_copies: bool = False
    """Whether ``copies`` are written to published files, or only understood there."""

    rotary: tuple[RotaryRows | None, ...] = ()
    """For each source, which rows to reorder; empty: none."""

    block_scaled: bool = False
    """Whether published files may hold it in FP8 with one scale for each block."""

    fp32: bool = False
    """Whether it becomes float32 where a dtype is asked for, whatever that is."""
