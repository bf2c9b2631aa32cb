"""Source of a conversion: tensors by the rows of a conversion table, as published or as Megatron holds them.

Nothing is read before it is asked for, and what can be a view of a file is one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_megatron.convert.tensors.shapes import shape_of
from mt_megatron.convert.tensors.table import Sizes, check_names, listed, unpack
from mt_megatron.errors import CheckpointError
from mt_megatron.models.weights import TensorRow

Rows = Mapping[str, TensorRow]
"""Every single tensor's row, by its name in an unsharded Megatron model of local layers."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor as it will be read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class WholeTensors(Protocol):
    """A Megatron checkpoint of any form: whole tensors by their names in a model of local layers."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What there is."""

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor, or some of its rows."""

    def release(self, name: str) -> None:
        """Let go of the memory that reading it took."""


class Source(Protocol):
    """What a destination asks for, by the rows of a conversion table."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which Megatron's tensor ``name`` will come."""

    def published(self, name: str) -> list[Tensor]:
        """The published tensors of the row ``name``, in the order of its sources."""

    def parts(self, name: str) -> list[Tensor]:
        """Megatron's tensor ``name`` without padding, as parts that lie below each other."""

    def release(self, name: str) -> None:
        """The row ``name`` is done with."""


@dataclass(frozen=True, kw_only=True)
class MegatronSource:
    """A Megatron checkpoint by the rows of a table."""

    checkpoint: WholeTensors
    rows: Rows
    sizes: Sizes
    target: torch.dtype | None
    keeps_padding: bool = False
    """Whether ``parts`` have the rows that pad the vocabulary, as many as there are and fit: a run goes on
    with what it has there."""

    def check(self, model: Any, ignored: Collection[str] = ()) -> None:
        """Raise ``CheckpointError`` as ``PublishedSource.check`` does. The vocabulary may be padded."""
        found = self.checkpoint.tensors
        check_names(set(found) - set(ignored), set(self.rows), "Megatron")
        wrong = []
        for name, row in self.rows.items():
            shape, expected = found[name].shape, shape_of(name, model)
            fits = shape == expected
            if row.vocabulary:
                fits = shape[1:] == expected[1:] and shape[0] >= expected[0]
            if not fits:
                wrong.append(f"{name}: {shape}, expected {expected}")
        raise_wrong(wrong)

    def dtype(self, name: str) -> torch.dtype:
        return dtype_of(self.rows[name], self.checkpoint.tensors[name].dtype, self.target)

    def published(self, name: str) -> list[Tensor]:
        row, dtype = self.rows[name], self.dtype(name)
        if row.packing == "stacked" and not row.rotary:
            return self.parts(name)
        [whole] = self.parts(name)
        if row.vocabulary:
            whole = whole[: self.sizes.vocab_size]
        return [part.to(dtype) for part in unpack(row, whole, self.sizes)]

    def parts(self, name: str) -> list[Tensor]:
        row, kept, dtype = self.rows[name], self.checkpoint.tensors[name], self.dtype(name)
        ranges: list[tuple[int, int] | None] = [None]
        if row.vocabulary:
            most = self.sizes.padded_vocab_size if self.keeps_padding else self.sizes.vocab_size
            ranges = [(0, min(kept.shape[0], most))]
        elif row.packing == "stacked" and not row.rotary:
            each = kept.shape[0] // len(row.sources)
            ranges = [(index * each, (index + 1) * each) for index in range(len(row.sources))]
        return [self.checkpoint.read(name, rows).to(dtype) for rows in ranges]

    def release(self, name: str) -> None:
        self.checkpoint.release(name)


def dtype_of(row: TensorRow, stored: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    """The dtype in which a row's tensor comes: as ``stored``, or as asked for; fp32 where the row says so."""
    if target is None:
        return stored
    return torch.float32 if row.fp32 else target


def raise_wrong(wrong: list[str]) -> None:
    """Raise ``CheckpointError`` that lists the tensors in ``wrong``, if there are any."""
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors are not what the configuration says: {listed(wrong, 20)}. Check that it "
            "describes this model"
        )
