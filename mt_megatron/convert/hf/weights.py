"""Published weights: the safetensors files of a folder, read tensor by tensor; a conversion's source."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_megatron.convert.folders import CONFIG, read_json
from mt_megatron.convert.hf.fp8_blocks import BLOCK, SUFFIX, dequantise
from mt_megatron.convert.hf.safetensors_format import Stored, read_header
from mt_megatron.convert.tensors.mapped_file import MappedFile
from mt_megatron.convert.tensors.shapes import shape_of
from mt_megatron.convert.tensors.sources import Rows, TensorInfo, dtype_of, raise_wrong
from mt_megatron.convert.tensors.table import Sizes, check_copy, check_names, listed, pack
from mt_megatron.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_FP8 = torch.float8_e4m3fn


class PublishedFolder:
    """The tensors of a folder by name. FP8 weights come multiplied with their scales, and
    the scales have no names of their own. Threads may share it."""

    def __init__(self, folder: Path, fp8_as: torch.dtype = torch.bfloat16) -> None:
        """Reads headers only; FP8 weights will be read as ``fp8_as``. Raises ``CheckpointError`` for
        missing, damaged or contradicting files."""
        self.folder = folder
        self._fp8_as = fp8_as
        self.config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
        self._places = _places(folder, self.config.get("transformers_weights"))
        self._block = _fp8_block(folder, self.config)
        self._maps: dict[Path, MappedFile] = {}
        self._lock = threading.Lock()
        scales = {
            name + SUFFIX: name
            for name, (_, stored) in self._places.items()
            if stored.dtype == _FP8 and name + SUFFIX in self._places
        }
        bare = [
            name
            for name, (_, stored) in self._places.items()
            if stored.dtype == _FP8 and name + SUFFIX not in self._places
        ]
        if bare:
            raise CheckpointError(
                f"{folder} has FP8 weights without {SUFFIX}: {listed(sorted(bare))}. Only block-scaled FP8 "
                "is understood; give a folder in bfloat16"
            )
        eight = any(stored.dtype == _FP8 for _, stored in self._places.values())
        if eight != bool(self.config.get("quantization_config")):
            raise CheckpointError(
                f"{folder} has {'FP8 weights' if eight else 'no FP8 weights'}, and {CONFIG} has "
                f"{'no' if eight else 'a'} quantization_config; expected both or neither. Correct {CONFIG}"
            )
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(dtype=fp8_as if stored.dtype == _FP8 else stored.dtype, shape=stored.shape)
            for name, (_, stored) in self._places.items()
            if name not in scales
        }

    def read(self, name: str) -> Tensor:
        """The tensor ``name``: a view of its file, or what it is multiplied with its scales."""
        path, stored = self._places[name]
        if stored.dtype != _FP8:
            return self._raw(path, stored)
        scale_path, scale = self._places[name + SUFFIX]
        return dequantise(
            self._raw(path, stored),
            self._raw(scale_path, scale),
            self._fp8_as,
            block=self._block,
            name=name,
        )

    def release(self, name: str) -> None:
        """Let go of the memory that reading ``name`` took."""
        path, stored = self._places[name]
        self._map(path).release(stored.offset, stored.length)

    def _raw(self, path: Path, stored: Stored) -> Tensor:
        return self._map(path).tensor(stored.offset, stored.dtype, stored.shape)

    def _map(self, path: Path) -> MappedFile:
        with self._lock:
            if path not in self._maps:
                self._maps[path] = MappedFile(path)
            return self._maps[path]


@dataclass(frozen=True, kw_only=True)
class PublishedSource:
    """Published files by the rows of a table."""

    folder: PublishedFolder
    rows: Rows
    sizes: Sizes
    target: torch.dtype | None
    """The dtype that is asked for; None: as it is stored."""

    def check(self, model: Any, ignored: Collection[str] = ()) -> None:
        """Raise ``CheckpointError`` for tensors that are missing, unknown, or of another shape than the
        configuration (a ``ModelConfig``) says. ``ignored`` names are known and not wanted."""
        found = self.folder.tensors
        needed = {name for row in self.rows.values() for name in row.sources}
        copies = {name for row in self.rows.values() for name in row.copies}
        check_names(set(found) - set(ignored), needed, "published", optional=copies)
        wrong = []
        for name, row in self.rows.items():
            shapes = [found[source].shape for source in row.sources]
            expected = shape_of(name, model)
            together = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            if together != expected or len({shape[1:] for shape in shapes}) > 1:
                wrong.append(f"{' + '.join(row.sources)}: {shapes}, expected {expected} together")
            if len({found[source].dtype for source in row.sources}) > 1:
                wrong.append(f"{' + '.join(row.sources)}: dtypes differ")
        raise_wrong(wrong)

    def check_copies(self) -> None:
        """Raise ``CheckpointError`` where a tensor that repeats another is not equal to it."""
        for name, row in self.rows.items():
            if any(copy in self.folder.tensors for copy in row.copies):
                self.published(name)
                self.release(name)

    def dtype(self, name: str) -> torch.dtype:
        row = self.rows[name]
        return dtype_of(row, self.folder.tensors[row.sources[0]].dtype, self.target)

    def published(self, name: str) -> list[Tensor]:
        row, dtype = self.rows[name], self.dtype(name)
        tensors = [self.folder.read(source) for source in row.sources]
        for copy in row.copies:
            if copy in self.folder.tensors:
                check_copy(copy, self.folder.read(copy), row.sources[0], tensors[0])
                self.folder.release(copy)
        return [tensor.to(dtype) for tensor in tensors]

    def parts(self, name: str) -> list[Tensor]:
        row, tensors = self.rows[name], self.published(name)
        if row.packing == "stacked" and not row.rotary:
            return tensors
        return [pack(row, tensors, self.sizes)]

    def release(self, name: str) -> None:
        for source in self.rows[name].sources:
            self.folder.release(source)


def of_prediction(names: Collection[str], num_layers: int) -> set[str]:
    """Published names of layers of multi-token prediction: behind the model's last, with an ``eh_proj``."""
    behind: dict[int, set[str]] = {}
    for name in names:
        words = name.split(".")
        if words[:2] == ["model", "layers"] and words[2].isdigit() and int(words[2]) >= num_layers:
            behind.setdefault(int(words[2]), set()).add(name)
    return {
        name
        for layer, found in behind.items()
        for name in found
        if f"model.layers.{layer}.eh_proj.weight" in found
    }


def _places(folder: Path, explicit: Any) -> dict[str, tuple[Path, Stored]]:
    """Where each tensor lies. transformers takes the file that ``explicit`` names, else the single one, else
    those of the index: raises ``CheckpointError`` where these are not the same files."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; expected one with safetensors files")
    index, single = folder / INDEX, folder / SINGLE
    found = _from_index(index) if index.exists() else _from_files(folder)
    files = sorted({path.name for path, _ in found.values()})
    if index.exists() and single.exists() and files != [SINGLE]:
        raise CheckpointError(
            f"{folder} has {SINGLE}, which transformers reads, and {INDEX}, which names {listed(files, 5)}; "
            "expected one of both. Remove the one that is not of these weights"
        )
    if explicit is not None and explicit != (INDEX if index.exists() else SINGLE) and [explicit] != files:
        raise CheckpointError(
            f"{folder / CONFIG} has transformers_weights = {explicit!r}, and the folder's weights are in "
            f"{listed(files, 5)}; expected no such entry, or the same files. Correct it"
        )
    return found


def _from_index(index: Path) -> dict[str, tuple[Path, Stored]]:
    folder = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map; give a complete copy of it")
    for file in set(weight_map.values()):
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} names the file {file!r}, expected one beside it")
    files = {folder / file for file in weight_map.values()}
    absent = sorted(path.name for path in files if not path.is_file())
    if absent:
        raise CheckpointError(f"{folder} lacks {len(absent)} files that its index names: {listed(absent)}")
    headers = {path: read_header(path) for path in sorted(files)}
    twice = sorted(
        f"{name} in {path.name} and {weight_map[name]}"
        for path, header in headers.items()
        for name in header
        if name in weight_map and weight_map[name] != path.name
    )
    if twice:
        raise CheckpointError(
            f"{len(twice)} tensors are in another file than {index} says as well: {listed(twice)}. Give the "
            "files of one save, without those of another"
        )
    missing = sorted(name for name, file in weight_map.items() if name not in headers[folder / file])
    unnamed = sorted(name for header in headers.values() for name in header if name not in weight_map)
    if missing or unnamed:
        raise CheckpointError(
            f"{index} and the files beside it disagree: {len(missing)} tensors are not in their files "
            f"{listed(missing)}, {len(unnamed)} are not in the index {listed(unnamed)}"
        )
    return {name: (folder / file, headers[folder / file][name]) for name, file in sorted(weight_map.items())}


def _from_files(folder: Path) -> dict[str, tuple[Path, Stored]]:
    single = folder / SINGLE
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        other = [each.name for each in sorted(folder.glob("pytorch_model*.bin"))]
        hint = f"; {', '.join(other[:3])} are pickles, which are not read" if other else ""
        raise CheckpointError(f"{folder} has no safetensors files{hint}")
    places: dict[str, tuple[Path, Stored]] = {}
    for path in files:
        for name, stored in read_header(path).items():
            if name in places:
                raise CheckpointError(
                    f"{name} is in {places[name][0].name} and in {path.name}, and there is no {INDEX} to say "
                    "which to take"
                )
            places[name] = (path, stored)
    return places


def _fp8_block(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    settings = config.get("quantization_config")
    if not settings:
        return BLOCK
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or not isinstance(block, list) or len(block) != 2:
        raise CheckpointError(
            f"{folder / CONFIG} has quantization_config with quant_method {method!r} and weight_block_size "
            f"{block!r}; expected 'fp8' and two numbers. Give a folder without quantisation"
        )
    return int(block[0]), int(block[1])
