"""A Megatron-LM checkpoint in the ``torch`` form: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, one file for
each tensor, pipeline and expert parallel rank, put together tensor by tensor."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mt_megatron.convert.rank_files.arguments import load_trusted
from mt_megatron.convert.rank_files.names import ChunkNames
from mt_megatron.convert.rank_files.optimizer import has_state_by_parameter, state_by_parameter
from mt_megatron.convert.run_state import RunState
from mt_megatron.convert.tensors.shapes import split_axis
from mt_megatron.convert.tensors.sources import TensorInfo
from mt_megatron.convert.tensors.state_names import kind_of, state_name
from mt_megatron.errors import CheckpointError
from mt_megatron.parallel.stage_layers import stage_layers

STATE = "model_optim_rng.pt"
_FLAT = "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


def is_torch_folder(folder: Path) -> bool:
    """Whether ``folder`` holds a checkpoint of this form."""
    return bool(rank_files(folder))


def rank_files(folder: Path) -> list[Path]:
    """The files of a checkpoint of this form, one for each model-parallel rank."""
    return sorted(each for each in folder.glob(f"mp_rank_*/{STATE}") if _RANK.fullmatch(each.parent.name))


@dataclass
class _Parts:
    """One tensor of the whole model, by tensor-parallel rank."""

    by_rank: dict[int, Tensor] = field(default_factory=dict)


class TorchFolder:
    """The tensors of such a checkpoint by name; the files are mapped, not read. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises ``CheckpointError`` when ranks are missing or contradict each other."""
        self.folder = folder
        found = {}
        for path in sorted(folder.glob(f"mp_rank_*/{STATE}")):
            matched = _RANK.fullmatch(path.parent.name)
            if matched is not None:
                found[tuple(int(each) for each in matched.groups() if each is not None)] = path
        if not found:
            raise CheckpointError(f"{folder} has no mp_rank_*/{STATE}")
        first = _state(found[min(found)])
        args = first.get("args")
        if not isinstance(args, argparse.Namespace):
            raise CheckpointError(
                f"{found[min(found)]} has no args, which say how the checkpoint is laid out; expected one "
                "that Megatron-LM's save_checkpoint wrote"
            )
        self.arguments = args
        self.iteration = int(first.get("iteration") or 0)
        self._gated = bool(getattr(args, "swiglu", False))
        self._sizes = {
            name: int(getattr(args, f"{name}_model_parallel_size", 1) or 1)
            for name in ("tensor", "pipeline", "expert")
        }
        if getattr(args, "moe_extended_tp", False) and self._sizes["expert"] > 1:
            raise CheckpointError(
                f"{folder} is of a run with --moe-extended-tp, which cuts every expert over the tensor and "
                "expert parallel ranks together; expected experts cut over the tensor parallel ranks alone. "
                "Convert a checkpoint of a run without --moe-extended-tp"
            )
        ranks = _by_rank(folder, found, self._sizes)
        flat = sorted(path.parent / _FLAT for path in ranks.values() if (path.parent / _FLAT).exists())
        self.has_optimizer = "optimizer" in first or bool(flat)
        self.flat_optimizer: str | None = None
        if self.has_optimizer and (flat or not has_state_by_parameter(first.get("optimizer", {}))):
            self.flat_optimizer = (
                f"its distributed optimizer's state lies in flat buffers ({_FLAT}) without the parameters' "
                "places in them; Megatron-LM saves it by parameter with --use-dist-ckpt "
                "--ckpt-fully-parallel-save, or without --use-distributed-optimizer"
            )
        self._first = {name: first.get(name) for name in ("optimizer", "opt_param_scheduler")}
        self._where = str(found[min(found)])
        self.notes: tuple[str, ...] = ()
        self._parts: dict[str, _Parts] = {}
        stages = stage_layers(_layers_of(args))
        for rank, path in sorted(ranks.items()):
            state = first if path == found[min(found)] else _state(path)
            self._add(rank, state, stages)
            if self.has_optimizer and self.flat_optimizer is None:
                self._add_optimizer(rank, state, stages, str(path))
        kept = {
            name: TensorInfo(dtype=parts.by_rank[0].dtype, shape=self._shape(name, parts))
            for name, parts in sorted(self._parts.items())
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: each for name, each in kept.items() if kind_of(name) is None
        }
        self.state: Mapping[str, TensorInfo] = {
            name: each for name, each in kept.items() if kind_of(name) is not None
        }

    def run_state(self) -> RunState:
        """What the optimizer holds beside tensors, as the first rank has it. Raises ``CheckpointError``."""
        return RunState.of(self._first["optimizer"], self._first["opt_param_scheduler"], self._where)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor ``name``, or some of its rows, put together from all tensor-parallel ranks.

        Raises ``CheckpointError`` when ranks that should hold the same hold different numbers.
        """
        whole = self._whole(name, [tensor for _, tensor in sorted(self._parts[name].by_rank.items())])
        return whole if rows is None else whole[rows[0] : rows[1]]

    def release(self, name: str) -> None:
        """Nothing to do: the pages belong to the file."""

    def _whole(self, name: str, ranks: list[Tensor]) -> Tensor:
        axis = split_axis(name)
        if axis is None:
            for rank, tensor in enumerate(ranks):
                if not torch.equal(tensor, ranks[0]):
                    raise CheckpointError(
                        f"{self.folder}: {name} differs between tensor-parallel ranks 0 and {rank}, which "
                        "should hold the same"
                    )
            return ranks[0]
        if len(ranks) == 1:
            return ranks[0]
        if self._is_gated(name):
            halves = [tensor.chunk(2, dim=0) for tensor in ranks]
            return torch.cat([each[0] for each in halves] + [each[1] for each in halves], dim=0)
        return torch.cat(ranks, dim=axis)

    def _shape(self, name: str, parts: _Parts) -> tuple[int, ...]:
        if sorted(parts.by_rank) != list(range(self._sizes["tensor"])):
            raise CheckpointError(
                f"{self.folder}: {name} is on the tensor-parallel ranks {sorted(parts.by_rank)}, expected "
                f"all of {self._sizes['tensor']}"
            )
        shape, axis = list(parts.by_rank[0].shape), split_axis(name)
        if axis is not None:
            shape[axis] = sum(tensor.shape[axis] for tensor in parts.by_rank.values())
        return tuple(shape)

    def _is_gated(self, name: str) -> bool:
        return self._gated and "linear_fc1." in name

    def _add(self, rank: tuple[int, int, int], state: Mapping[str, Any], stages: list[list[int]]) -> None:
        for index, chunk in enumerate(_chunks(state)):
            self._add_chunk(rank, index, chunk, stages)

    def _add_optimizer(
        self, rank: tuple[int, int, int], state: Mapping[str, Any], stages: list[list[int]], where: str
    ) -> None:
        chunks = _chunks(state)
        if "optimizer" not in state or not has_state_by_parameter(state["optimizer"]):
            raise CheckpointError(
                f"{where} has no optimizer's state by parameter and {self._where} has; give a complete copy"
            )
        found = state_by_parameter(state["optimizer"], chunks, spread=self._sizes["expert"] > 1, where=where)
        for kind, tensors in found.items():
            for index in range(len(chunks)):
                chunk = {name: tensor for (of, name), tensor in tensors.items() if of == index}
                self._add_chunk(rank, index, chunk, stages, kind)

    def _add_chunk(
        self,
        rank: tuple[int, int, int],
        index: int,
        chunk: Mapping[str, Any],
        stages: list[list[int]],
        kind: str | None = None,
    ) -> None:
        tensor_rank, stage, expert_rank = rank
        experts = int(getattr(self.arguments, "num_experts", None) or 0) // self._sizes["expert"]
        tied = not getattr(self.arguments, "untie_embeddings_and_output_weights", False)
        names = ChunkNames(
            layers=stages[index * self._sizes["pipeline"] + stage],
            experts=experts,
            first_expert=expert_rank * experts,
            hidden_size=int(self.arguments.hidden_size),
        )
        for name, value in chunk.items():
            if name.endswith("_extra_state") or not isinstance(value, Tensor):
                continue
            if name == "output_layer.weight" and tied:
                continue
            if name.startswith("embedding.") and stage > 0:
                continue  # The copy that multi-token prediction has on the last stage.
            for whole, part in names.whole(name, value):
                parts = self._parts.setdefault(state_name(kind, whole), _Parts())
                parts.by_rank.setdefault(tensor_rank, part)


def _state(path: Path) -> Mapping[str, Any]:
    try:
        state = load_trusted(path, mmap=True)
    except CheckpointError as error:
        if "mmap" not in str(error):
            raise
        # An archive of torch before 1.6 cannot be mapped.
        state = load_trusted(path)
    if not isinstance(state, dict) or not ("model" in state or "model0" in state):
        raise CheckpointError(f"{path} holds no model; expected what Megatron-LM's save_checkpoint wrote")
    return state


def _chunks(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of a rank's model chunks."""
    chunks: list[Mapping[str, Any]] = [state["model"]] if "model" in state else []
    while f"model{len(chunks)}" in state:
        chunks.append(state[f"model{len(chunks)}"])
    return chunks


def _by_rank(
    folder: Path, found: Mapping[tuple[int, ...], Path], sizes: Mapping[str, int]
) -> dict[tuple[int, int, int], Path]:
    """The files by (tensor, pipeline, expert) rank. Raises ``CheckpointError`` unless all are there."""
    ranks = {}
    for numbers, path in found.items():
        rest = list(numbers[1:])
        # Folders name a rank of the pipeline or of the experts only where there are several.
        stage = rest.pop(0) if sizes["pipeline"] > 1 and rest else 0
        expert = rest.pop(0) if sizes["expert"] > 1 and rest else 0
        ranks[(numbers[0], stage, expert)] = path
    expected = {
        (tensor, stage, expert)
        for tensor in range(sizes["tensor"])
        for stage in range(sizes["pipeline"])
        for expert in range(sizes["expert"])
    }
    missing = sorted(expected - set(ranks))
    if missing or len(ranks) != len(found):
        raise CheckpointError(
            f"{folder} should have {len(expected)} mp_rank_* folders by its args (tensor {sizes['tensor']}, "
            f"pipeline {sizes['pipeline']}, expert {sizes['expert']}); found {len(found)}, missing (tensor, "
            f"pipeline, expert) {missing[:8]}"
        )
    return {rank: path for rank, path in ranks.items() if rank in expected}


def _layers_of(args: argparse.Namespace) -> SimpleNamespace:
    given = vars(args)
    return SimpleNamespace(
        num_layers=given["num_layers"],
        pipeline_model_parallel_size=given.get("pipeline_model_parallel_size") or 1,
        virtual_pipeline_model_parallel_size=given.get("virtual_pipeline_model_parallel_size"),
        pipeline_model_parallel_layout=given.get("pipeline_model_parallel_layout"),
        num_layers_in_first_pipeline_stage=given.get("decoder_first_pipeline_num_layers"),
        num_layers_in_last_pipeline_stage=given.get("decoder_last_pipeline_num_layers"),
        mtp_num_layers=given.get("mtp_num_layers"),
    )
