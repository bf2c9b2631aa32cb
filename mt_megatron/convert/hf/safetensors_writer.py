"""Safetensors files and their index, planned from names, shapes and dtypes, written tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mt_megatron.checkpoint.items import memory_of
from mt_megatron.convert.hf.fp8_blocks import SUFFIX, quantise, scale_shape
from mt_megatron.convert.hf.safetensors_format import header_bytes
from mt_megatron.convert.hf.weights import INDEX, SINGLE
from mt_megatron.convert.output_folder import FileTask
from mt_megatron.convert.tensors.sources import Rows, Source

_FP8 = torch.float8_e4m3fn
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """What one row of a conversion table becomes: tensors of one file, in the order they are written."""

    name: str
    """Of the row."""

    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    size: int


class SafetensorsWriter:
    """The weight files of a published folder."""

    def __init__(
        self,
        source: Source,
        rows: Rows,
        shapes: Mapping[str, tuple[tuple[int, ...], ...]],
        *,
        max_shard_size: int,
        fp8: bool = False,
        fp8_recipe: str | None = None,
        in_bf16: Callable[[int], bool] = lambda layer: False,
    ) -> None:
        """``shapes`` are, for each row, those of its published tensors. A file has at most
        ``max_shard_size`` bytes of tensors, or one row. ``fp8``: with block-scaled weights; with a recipe
        its power-of-two scales, and without the layers (from 0) that stay ``in_bf16`` under it."""
        self._source = source
        self._rows = rows
        self._fp8 = fp8
        self._recipe = fp8_recipe
        self._in_bf16 = in_bf16
        self._files: list[list[_Entry]] = [[]]
        for name, row in rows.items():
            entry = self._entry(name, shapes[name])
            used = sum(each.size for each in self._files[-1])
            if self._files[-1] and used + entry.size > max_shard_size:
                self._files.append([])
            self._files[-1].append(entry)
            # Copies are tensors of their own, behind what they repeat.
            for copy in row.copies if row.writes_copies else ():
                _, dtype, shape = entry.tensors[0]
                again = replace(entry, tensors=((copy, dtype, shape),))
                if sum(each.size for each in self._files[-1]) + again.size > max_shard_size:
                    self._files.append([])
                self._files[-1].append(again)

    def tasks(self) -> list[FileTask]:
        """The files."""
        return [
            FileTask(
                name=self._name(index),
                size=sum(entry.size for entry in entries),
                produce=lambda entries=entries: self._produce(entries),  # type: ignore[misc]
            )
            for index, entries in enumerate(self._files)
        ]

    def index(self) -> dict[str, str]:
        """The index beside several files, by name; nothing for one file."""
        if len(self._files) == 1:
            return {}
        total = sum(entry.size for entries in self._files for entry in entries)
        weight_map = {
            name: self._name(index)
            for index, entries in enumerate(self._files)
            for entry in entries
            for name, _, _ in entry.tensors
        }
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return {INDEX: json.dumps(document, indent=2) + "\n"}

    def _entry(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> _Entry:
        row, dtype = self._rows[name], self._source.dtype(name)
        tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        for source, shape in zip(row.sources, shapes, strict=True):
            if self._fp8 and row.block_scaled and not self._stays(source):
                tensors.append((source, _FP8, shape))
                rows, columns = shape
                tensors.append((source + SUFFIX, torch.float32, scale_shape(rows, columns)))
            else:
                tensors.append((source, dtype, shape))
        size = sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in tensors)
        return _Entry(name=name, tensors=tuple(tensors), size=size)

    def modules_in_bf16(self) -> list[str]:
        """Modules of FP8 files that are not in FP8, by the names that readers have for them: routers, and
        what the recipe leaves as it is."""
        if not self._fp8:
            return []
        found = []
        for name, row in self._rows.items():
            if name.endswith(".router.weight"):
                # Some readers have a plain linear there and would look for its scale.
                found.append(row.sources[0].removesuffix(".weight"))
            elif row.block_scaled:
                for source in filter(self._stays, row.sources):
                    found += [source.removesuffix(".weight"), *_modules_around(source)]
        return list(dict.fromkeys(found))

    def _stays(self, published: str) -> bool:
        """True for a tensor that stays as it is under the recipe."""
        layer = _LAYER.search(published)
        return self._recipe is not None and layer is not None and self._in_bf16(int(layer[1]))

    def _produce(self, entries: list[_Entry]) -> Iterator[Any]:
        yield header_bytes([tensor for entry in entries for tensor in entry.tensors])
        for entry in entries:
            row = self._rows[entry.name]
            published = dict(zip(row.sources, self._source.published(entry.name), strict=True))
            published |= dict.fromkeys(row.copies, published[row.sources[0]])
            scale: Tensor | None = None
            for name, dtype, _ in entry.tensors:
                if scale is not None:
                    yield memory_of(scale)
                    scale = None
                elif dtype == _FP8:
                    weight, scale = quantise(published[name], name=name, power_of_2=self._recipe is not None)
                    yield memory_of(weight)
                else:
                    yield memory_of(published[name].contiguous())
            del published
            self._source.release(entry.name)

    def _name(self, index: int) -> str:
        count = len(self._files)
        return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _modules_around(published: str) -> list[str]:
    """The module of all experts of the layer that ``published`` is in, if it is of an expert.

    transformers 5 has no modules for single experts: their names match nothing there, and it would look for
    the scales of a module that is not listed itself.
    """
    expert = _EXPERT.match(published)
    if expert is None:
        return []
    # transformers 5 gives Mixtral's module the name that all others have.
    return [expert[1], expert[1].replace(".block_sparse_moe.", ".mlp.")]
