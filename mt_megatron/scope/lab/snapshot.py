"""Everything that training changes, kept on the host and put back to the bit.

Weights, buffers (the expert bias among them), the optimizer's state and fp32 copies, of the distributed
optimizer this rank's shards, the loss scaler, the schedule, FP8 scales and histories, random states, and
what the trainer counts: progress, data position, running means.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mt_megatron.checkpoint.rng import capture_rng, restore_rng
from mt_megatron.checkpoint.run_parts import synchronised_parameters
from mt_megatron.fp8.state import states_of
from mt_megatron.host import limits
from mt_megatron.scope.lab.changes import parts_of
from mt_megatron.scope.trainer import Trainer

MIB = 2**20


class Snapshot:
    """The state of one rank between two steps. ``restore`` may be called again and again."""

    def __init__(self, trainer: Trainer) -> None:
        """Take it. Collective where parameters are gathered while the next step runs: they are completed
        first."""
        self.step = trainer.iteration
        """Completed steps."""

        self.bytes = 0
        """Host memory that it takes."""

        self._trainer = trainer
        self._restoring: list[Callable[[], None]] = []
        with synchronised_parameters(trainer), torch.no_grad():  # type: ignore[arg-type]
            self._keep_modules()
            for part in parts_of(trainer.optimizer):
                self._keep_optimizer(part)
        self._keep_rest()

    def restore(self) -> None:
        """Put everything back. Collective as taking it was."""
        _finish_reductions(self._trainer)
        with synchronised_parameters(self._trainer), torch.no_grad():  # type: ignore[arg-type]
            for restore in self._restoring:
                restore()

    def _kept(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach().to("cpu", copy=True)
        self.bytes += kept.numel() * kept.element_size()
        return kept

    def _keep_tensor(self, tensor: Tensor) -> None:
        kept = self._kept(tensor)
        self._restoring.append(lambda: _copy_into(tensor, kept))

    def _keep_modules(self) -> None:
        for tensor in _parameters(self._trainer):
            self._keep_tensor(tensor)
        for owner, name, buffer in _buffers(self._trainer):
            kept = self._kept(buffer)

            def restore(owner: Any = owner, name: str = name, kept: Tensor = kept) -> None:
                # Looked up anew: what moves or casts a module puts other tensors into it.
                _copy_into(owner._buffers[name], kept)

            self._restoring.append(restore)

    def _keep_optimizer(self, part: Any) -> None:
        inner = part.optimizer
        for tensor in _masters(part, self._trainer):
            self._keep_tensor(tensor)
        groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in inner.param_groups
        ]
        state = {
            parameter: {
                key: self._kept(value) if isinstance(value, Tensor) else copy.deepcopy(value)
                for key, value in values.items()
            }
            for parameter, values in inner.state.items()
        }

        def restore() -> None:
            for group, kept in zip(inner.param_groups, groups, strict=True):
                for key in [key for key in group if key != "params" and key not in kept]:
                    del group[key]
                group.update(copy.deepcopy(kept))
            for parameter in [each for each in inner.state if each not in state]:
                # Made by a later first update: the next one makes it again.
                del inner.state[parameter]
            for parameter, values in state.items():
                _restore_values(inner.state[parameter], values)

        self._restoring.append(restore)
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None:
            scales = copy.deepcopy(scaler.state_dict())
            self._restoring.append(lambda: scaler.load_state_dict(copy.deepcopy(scales)))

    def _keep_rest(self) -> None:
        trainer, restoring = self._trainer, self._restoring
        scheduler = trainer.scheduler
        plain = {key: value for key, value in vars(scheduler).items() if key != "optimizer"}
        kept = copy.deepcopy(plain)
        restoring.append(lambda: vars(scheduler).update(copy.deepcopy(kept)))
        for state in states_of(trainer.chunks):
            restoring.append(state.snapshot())
            for linear in state.every():
                scale = linear.gathered_scale
                scale = None if scale is None else scale.clone()
                restoring.append(partial(setattr, linear, "gathered_scale", scale))
        random_states = capture_rng(trainer)  # type: ignore[arg-type]
        restoring.append(lambda: restore_rng(random_states, trainer))  # type: ignore[arg-type]
        restoring.append(trainer.remember())


def _finish_reductions(trainer: Trainer) -> None:
    """Wait for the reductions of gradients that a step has begun before it raised an error: the next one
    refuses to begin any beside them."""
    for chunk in trainer.chunks:
        for name in ("bucket_groups", "expert_parallel_bucket_groups"):
            for group in getattr(chunk, name, ()):
                if getattr(group, "grad_reduce_handle", None) is not None:
                    group.grad_reduce_handle.wait()
                    group.grad_reduce_handle = None


def bytes_of(trainer: Trainer) -> int:
    """Host memory that a snapshot of this rank takes now, in bytes."""
    tensors = [*_parameters(trainer), *(buffer for _, _, buffer in _buffers(trainer))]
    for part in parts_of(trainer.optimizer):
        masters = _masters(part, trainer)
        tensors += masters
        states = part.optimizer.state
        tensors += [
            value for values in states.values() for value in values.values() if isinstance(value, Tensor)
        ]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not any(part.optimizer.state for part in parts_of(trainer.optimizer)):
        # Before the first update: two moments, in fp32, of what is updated.
        updated = (
            parameter
            for part in parts_of(trainer.optimizer)
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        )
        total += sum(8 * parameter.numel() for parameter in updated)
    return total


def default_limit_mib() -> float:
    """Half of the memory that the machine's ranks can still allocate, shared among them, in MiB."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return limits.memory().available / 2 / ranks / MIB


def _parameters(trainer: Trainer) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            found.setdefault(id(parameter), parameter)
    return list(found.values())


def _buffers(trainer: Trainer) -> Iterator[tuple[Any, str, Tensor]]:
    seen: set[int] = set()
    for chunk in trainer.chunks:
        for module in chunk.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield module, name, buffer


def _masters(part: Any, trainer: Trainer) -> list[Tensor]:
    """What the optimizer updates and is no memory of the model's."""
    models = {each.untyped_storage().data_ptr() for each in _parameters(trainer)}
    return [
        parameter
        for group in part.optimizer.param_groups
        for parameter in group["params"]
        if parameter.untyped_storage().data_ptr() not in models
    ]


def _copy_into(tensor: Tensor, kept: Tensor) -> None:
    # Through ``data``: writing must not be seen by autograd.
    tensor.data.copy_(kept)


def _restore_values(values: dict[str, Any], kept: dict[str, Any]) -> None:
    for key in [key for key in values if key not in kept]:
        del values[key]
    for key, value in kept.items():
        current = values.get(key)
        if isinstance(value, Tensor) and isinstance(current, Tensor) and current.shape == value.shape:
            _copy_into(current, value)
        elif isinstance(value, Tensor):
            values[key] = value.clone()
        else:
            values[key] = copy.deepcopy(value)
