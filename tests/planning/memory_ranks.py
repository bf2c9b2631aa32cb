"""Ranks that build what the trainer builds, run a step of it, and say how many bytes were held."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron


def measure(cases: list[list[str]]) -> list[dict[str, Any]]:
    """For each command line: bytes of weights, gradients and optimizer state that this rank holds after a
    step, the most bytes that autograd kept at once during it, and what was predicted."""
    warnings.filterwarnings("ignore")
    mt_megatron.patch("cpu")
    dist.init_process_group("gloo")
    return [_measure(case) for case in cases]


def _measure(argv: list[str]) -> dict[str, Any]:
    from mt_megatron.config.parse import load_config
    from mt_megatron.models.families import family_of
    from mt_megatron.planning.memory import state_memory
    from mt_megatron.planning.memory_estimate import memory_case, memory_of
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build
    from mt_megatron.training.step import Shape, make_forward_step, train_step
    from mt_megatron.training.validate import validate

    config = load_config(argv)
    validate(config, world_size=dist.get_world_size(), check_files=False)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        world = job.layout.world_size
        shape = Shape(
            num_microbatches=config.num_microbatches(world),
            micro_batch_size=config.train.micro_batch_size,
            seq_length=config.train.seq_length or 0,
        )
        live = LiveBytes(p for chunk in trainable.chunks for p in chunk.parameters())
        forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
        sources = [batches(config) for _ in trainable.chunks]
        with torch.autograd.graph.saved_tensors_hooks(live.pack, live.unpack):
            train_step(trainable, forward_step, sources, shape, job, iteration=1)
        # Context-parallel ranks share gradients and optimizer state with the data-parallel ones.
        index = job.at.dp * job.layout.cp + job.at.cp
        predicted = state_memory(memory_case(config, world), job.at.pp, index)
        # Ranks are looked at together, and together they receive their mean.
        stage = memory_of(config, world, on_cpu=True, expert_imbalance=1.0).stages[job.at.pp]
        return {
            "held": _state(trainable),
            "predicted": [predicted.weights, predicted.gradients, predicted.optimizer],
            "kept": live.peak,
            "activations": stage.activations,
            "worst": [stage.weights, stage.gradients, stage.optimizer],
        }


def batches(config: Any) -> Iterator[dict[str, torch.Tensor]]:
    size, length = config.train.micro_batch_size, config.train.seq_length
    for index in itertools.count():
        tokens = (torch.arange(size * length) * 7 + index).remainder(config.model.vocab_size)
        yield {
            "tokens": tokens.view(size, length),
            "labels": tokens.view(size, length).roll(-1, 1),
            "position_ids": torch.arange(length).expand(size, length),
            "loss_mask": torch.ones(size, length),
        }


def _bytes(tensors: Iterable[torch.Tensor], known: set[int] | None = None) -> int:
    """Bytes of the storages of ``tensors`` that are not in ``known``, each once; they are added to it."""
    known, total = set() if known is None else known, 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _state(trainable: Any) -> list[int]:
    parameters = [p for chunk in trainable.chunks for p in chunk.parameters()]
    known: set[int] = set()
    weights = _bytes(parameters, known)
    gradients = _bytes((p.main_grad for p in parameters), known)
    parts = getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer])
    optimizer = 0
    for part in parts:
        masters = [p for group in part.optimizer.param_groups for p in group["params"]]
        optimizer += _bytes(masters, known)
        # Adam's count of steps is a number, which torch happens to keep in a tensor.
        moments = [
            value
            for state in part.optimizer.state.values()
            for name, value in state.items()
            if name != "step" and torch.is_tensor(value)
        ]
        optimizer += _bytes(moments, known)
    return [weights, gradients, optimizer]


class LiveBytes:
    """Counts the storages that autograd keeps, while it keeps them."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        kept = _Kept(tensor)
        if address not in self._parameters:
            self._users[address] = self._users.get(address, 0) + 1
            self._sizes[address] = storage.nbytes()
            weakref.finalize(kept, self._release, address)
            self.peak = max(self.peak, sum(self._sizes.values()))
        return kept

    def unpack(self, kept: Any) -> torch.Tensor:
        tensor: torch.Tensor = kept.tensor
        return tensor

    def _release(self, address: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address], self._sizes[address]


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
