"""A Megatron-LM checkpoint in the ``torch`` form, written rank by rank.

``torch.save`` wants a rank's whole state at once. It is made in a file that is mapped beside the result
and removed again, so that memory holds one tensor at a time.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_megatron.convert.file_groups import expert_of, virtual_stage_of, virtual_stages
from mt_megatron.convert.optimizer_state import Carried
from mt_megatron.convert.output_folder import SCRATCH, FileTask
from mt_megatron.convert.rank_files.names import ChunkNames
from mt_megatron.convert.rank_files.optimizer import optimizer_document
from mt_megatron.convert.rank_files.reader import STATE
from mt_megatron.convert.settings import Model
from mt_megatron.convert.tensors.shapes import extra_state_of, require_one_dtype, split_axis
from mt_megatron.convert.tensors.shards import Shard, shards_of, take
from mt_megatron.convert.tensors.sources import Source
from mt_megatron.convert.tensors.state_names import kind_of, state_name
from mt_megatron.errors import CheckpointError
from mt_megatron.layers.transformer_fields import moe_layer_pattern

_GROUPED = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, kw_only=True)
class _Rank:
    tensor: int
    stage: int
    expert: int


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A tensor of one rank: shards of whole tensors below each other, or of one on top of the other."""

    name: str
    """In the rank's state."""

    whole: str
    shards: tuple[Shard, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    local: str
    """As a module of its own would name it."""

    expert: int | None = None
    """Where it lies transposed among this rank's experts; None: it is a tensor by itself."""


class TorchWriter:
    """The files of such a checkpoint, planned from names, shapes and dtypes alone."""

    def __init__(
        self,
        source: Source,
        model: Model,
        shapes: Mapping[str, tuple[int, ...]],
        arguments: argparse.Namespace,
        scratch: Path,
        carried: Carried | None = None,
    ) -> None:
        """``shapes`` are of whole tensors with padding; files that are removed again lie in ``scratch``."""
        self._carried = carried
        self._source = source
        self._model = model
        self._shapes = shapes
        self._arguments = arguments
        self._scratch = scratch
        config = model.config
        self._sizes = config.parallel
        self._stages = virtual_stages(config)
        self._experts = (config.model.num_moe_experts or 0) // self._sizes.expert_model_parallel_size
        self._untied = config.model.untie_embeddings_and_output_weights
        self._moe = moe_layer_pattern(config.model)
        self._fused = arguments.transformer_impl == "transformer_engine"
        self._together = bool(config.model.moe_grouped_gemm and not self._fused)

    def tasks(self) -> list[FileTask]:
        """One file for each rank. Raises ``CheckpointError`` where experts that lie together have different
        types."""
        for rank in self._ranks():
            for chunk in self._chunks(rank):
                require_one_dtype((held.name, held.whole, held.dtype) for held in chunk)
        return [self._task(rank) for rank in self._ranks()]

    def _ranks(self) -> Iterator[_Rank]:
        for stage in range(self._sizes.pipeline_model_parallel_size):
            for expert in range(self._sizes.expert_model_parallel_size):
                for tensor in range(self._sizes.tensor_model_parallel_size):
                    yield _Rank(tensor=tensor, stage=stage, expert=expert)

    def _task(self, rank: _Rank) -> FileTask:
        folder = f"mp_rank_{rank.tensor:02d}"
        if self._sizes.pipeline_model_parallel_size > 1:
            folder += f"_{rank.stage:03d}"
        if self._sizes.expert_model_parallel_size > 1:
            folder += f"_{rank.expert:03d}"
        held = [each for chunks in self._by_kind(rank).values() for chunk in chunks for each in chunk]
        size = sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in held)
        return FileTask(name=f"{folder}/{STATE}", size=size, save=partial(self._save, rank))

    def _by_kind(self, rank: _Rank) -> dict[str | None, list[list[_Held]]]:
        """What each chunk of the rank holds: of the model (None) and of each kind of the optimizer's."""
        chunks = self._chunks(rank)
        found: dict[str | None, list[list[_Held]]] = {None: chunks}
        for kind in () if self._carried is None else self._carried.kinds:
            found[kind] = [
                [
                    replace(each, whole=name, dtype=self._source.dtype(name))
                    for each in chunk
                    if (name := state_name(kind, each.whole)) in self._model.rows
                ]
                for chunk in chunks
            ]
        return found

    def _chunks(self, rank: _Rank) -> list[list[_Held]]:
        pipeline = self._sizes.pipeline_model_parallel_size
        found = []
        for index in range(len(self._stages) // pipeline):
            stage = index * pipeline + rank.stage
            found.append(self._held(rank, stage))
        return found

    def _held(self, rank: _Rank, stage: int) -> list[_Held]:
        model, config = self._model, self._model.config.model
        first = rank.expert * self._experts
        names = ChunkNames(
            layers=self._stages[stage],
            experts=self._experts,
            first_expert=first,
            hidden_size=config.hidden_size,
        )
        held = []
        for name, row in model.rows.items():
            if kind_of(name) is not None:
                continue
            expert = expert_of(name)
            if expert is not None and not first <= expert < first + self._experts:
                continue
            here = virtual_stage_of(name, self._stages) == stage
            for local in self._local(name, names, here, stage):
                shards = tuple(
                    shard
                    for shard in shards_of(
                        name,
                        row,
                        self._shapes[name],
                        split_axis(name),
                        self._sizes.tensor_model_parallel_size,
                    )
                    if split_axis(name) is None or shard.rank == rank.tensor
                )
                shape = shards[0].sizes
                if len(shards) > 1:
                    shape = (sum(shard.sizes[0] for shard in shards), *shape[1:])
                grouped = _GROUPED.fullmatch(local) if self._together else None
                held.append(
                    _Held(
                        name=local if grouped is None else f"{grouped[1]}.weight{grouped[3]}",
                        whole=name,
                        shards=shards,
                        shape=shape,
                        dtype=self._source.dtype(name),
                        expert=None if grouped is None else int(grouped[2]),
                        local=local,
                    )
                )
        # An optimizer counts parameters in this order.
        return sorted(held, key=lambda each: module_order(each.local, is_first_stage=stage == 0))

    def _local(self, name: str, names: ChunkNames, here: bool, stage: int) -> list[str]:
        """Under which names the chunk holds the tensor ``name``: none, its own, or that of a copy."""
        config, last = self._model.config.model, stage == len(self._stages) - 1
        found = []
        if here:
            words = name.split(".")
            is_layer = words[:2] == ["decoder", "layers"]
            found.append(
                names.local(
                    name,
                    transformer_engine=self._fused,
                    grouped=bool(config.moe_grouped_gemm),
                    is_moe=bool(self._moe[int(words[2])] if is_layer else self._moe[-1]),
                    latent=config.multi_latent_attention,
                )
            )
        if name == _EMBEDDING and last and len(self._stages) > 1:
            if not config.untie_embeddings_and_output_weights:
                found.append(_OUTPUT)
            if config.mtp_num_layers:
                found.append(_EMBEDDING)
        return found

    def _save(self, rank: _Rank, write: Callable[[Any], int]) -> None:
        by_kind = self._by_kind(rank)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self._scratch) as folder:
            every = [each for chunks in by_kind.values() for chunk in chunks for each in chunk]
            memory = _Memory(Path(folder), every)
            filled = {
                kind: [self._filled(chunk, memory) for chunk in chunks] for kind, chunks in by_kind.items()
            }
            states: list[dict[str, Tensor | None]] = []
            for chunk in filled[None]:
                # Linears ask for it when they are loaded strictly; local ones have nothing there.
                extra = (extra_state_of(name, transformer_engine=self._fused) for name in chunk)
                states.append({**chunk, **{name: None for name in extra if name is not None}})
            document: dict[str, Any] = {
                "args": self._arguments,
                "checkpoint_version": 3.0,
                "iteration": self._arguments.iteration,
                "num_floating_point_operations_so_far": 0,
            }
            if self._carried is not None:
                document["optimizer"] = optimizer_document(
                    self._carried.run,
                    filled[None],
                    {kind: chunks for kind, chunks in filled.items() if kind is not None},
                    spread=self._carried.expert_optimizer,
                    master=self._carried.master,
                )
                document["opt_param_scheduler"] = dict(self._carried.run.scheduler)
            for index, each in enumerate(states):
                document["model" if len(states) == 1 else f"model{index}"] = each
            torch.save(document, _Writer(write))  # type: ignore[arg-type]

    def _filled(self, chunk: Sequence[_Held], memory: _Memory) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for held in chunk:
            if held.expert is None:
                state[held.name] = memory.tensor(held.dtype, held.shape)
                self._fill(state[held.name], held)
                continue
            if held.name not in state:
                shape = (self._experts, held.shape[1], held.shape[0])
                state[held.name] = memory.tensor(held.dtype, shape)
            self._fill(state[held.name][held.expert].t(), held)
        if _OUTPUT in state and _EMBEDDING in state and not self._untied:
            state[_EMBEDDING] = state[_OUTPUT]  # One parameter of both modules.
        return {name: self._as_upstream(name, each) for name, each in state.items()}

    def _fill(self, tensor: Tensor, held: _Held) -> None:
        parts, row = self._source.parts(held.whole), 0
        for shard in held.shards:
            rows = shard.sizes[0] if shard.sizes else 0
            (tensor[row : row + rows] if rows else tensor).copy_(take(parts, shard))
            row += rows
        self._source.release(held.whole)

    def _as_upstream(self, name: str, tensor: Tensor) -> Tensor:
        """Megatron-Core 0.9.0 shows the experts that lie together in two dimensions."""
        hidden = self._model.config.model.hidden_size
        if name.endswith(".experts.weight1"):
            return tensor.view(hidden, -1)
        return tensor.view(-1, hidden) if name.endswith(".experts.weight2") else tensor


class _Memory:
    """Tensors in mapped files, one file for each dtype: torch.save refuses one storage as two types."""

    def __init__(self, folder: Path, held: Sequence[_Held]) -> None:
        sizes: dict[torch.dtype, int] = {}
        for each in held:
            sizes[each.dtype] = sizes.get(each.dtype, 0) + torch.Size(each.shape).numel()
        for index, (dtype, size) in enumerate(sizes.items()):
            _reserve(folder / str(index), max(1, size) * dtype.itemsize)
        self._storages = {
            dtype: torch.from_file(f"{folder}/{index}", shared=True, size=max(1, size), dtype=dtype)
            for index, (dtype, size) in enumerate(sizes.items())
        }
        self._used = dict.fromkeys(sizes, 0)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The next one of ``shape``."""
        start, count = self._used[dtype], torch.Size(shape).numel()
        self._used[dtype] += count
        return self._storages[dtype][start : start + count].view(shape)


def _reserve(path: Path, size: int) -> None:
    """Take the space for a file that is written by memory: without it the process would end by a signal.

    Raises ``CheckpointError`` when there is not enough.
    """
    try:
        with open(path, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except OSError as error:
        raise CheckpointError(
            f"{size} bytes for a rank's state cannot be taken in {path.parent.parent}: "
            f"{error.strerror or error}. Rank files take their size twice while they are written, for as "
            "many ranks at once as there are --workers: free space, lower --workers, or choose another place"
        ) from error


class _Writer:
    def __init__(self, write: Callable[[Any], int]) -> None:
        self._write = write

    def write(self, content: Any) -> int:
        return self._write(content)

    def flush(self) -> None:
        """Nothing waits here."""


# Order in which Megatron's modules hold a model's tensors; an optimizer in rank files counts by it.

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.")

_PARTS = ("embedding.", "decoder.layers.", "decoder.final_layernorm.", "output_layer.", "mtp.")

_IN_A_LAYER = (
    "enorm.",
    "hnorm.",
    "eh_proj.",
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "final_layernorm.",
)


def module_order(name: str, *, is_first_stage: bool) -> tuple[int, ...]:
    """Sorts the tensors of one chunk of a model, as local layers or Transformer Engine's name them."""
    layer = _LAYER.fullmatch(name)
    if name.startswith("embedding.") and not is_first_stage:
        return (len(_PARTS),)  # The copy for multi-token prediction, which is made last.
    if layer is None:
        return (_first(_PARTS, name),)
    rest = layer[3].removeprefix("transformer_layer.")
    expert = _EXPERT.search(rest)
    within = 2 * rest.endswith("bias") - ("layer_norm_" in rest)
    return (
        _first(_PARTS, name),
        int(layer[2]),
        _first(_IN_A_LAYER, rest),
        -1 if expert is None else int(expert[1]),
        int("linear_fc2" in rest),
        within,
    )


def _first(parts: tuple[str, ...], name: str) -> int:
    return next((index for index, part in enumerate(parts) if name.startswith(part)), len(parts))
