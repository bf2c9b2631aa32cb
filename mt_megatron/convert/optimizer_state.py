"""Optimizer tensors converted with the model's: by the same tables, sharded and packed alike.

Moments and master weights have the shape of the parameter they belong to, so that whatever a layout does to
a weight it does to them. Buffers (the bias of experts) have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.convert.run_state import RunState
from mt_megatron.convert.settings import Model
from mt_megatron.convert.tensors.sources import MegatronSource, TensorInfo
from mt_megatron.convert.tensors.state_names import MASTER, kind_of, state_name, weight_name
from mt_megatron.errors import CheckpointError


class HoldsState(Protocol):
    """A checkpoint with an optimizer's tensors beside the model's."""

    @property
    def state(self) -> Mapping[str, TensorInfo]:
        """What there is, by ``state_name``."""

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor, or some of its rows."""

    def release(self, name: str) -> None:
        """Let go of the memory that reading it took."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer's state in a source."""

    checkpoint: HoldsState
    run_state: Callable[[], RunState]
    """Raises ``CheckpointError`` for what is not understood."""

    progress: Mapping[str, Any]
    """How far the run is, as our manifest has it."""

    data_order: Any = None
    """What the order of samples depends on, as our manifest has it."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What a conversion writes of an optimizer."""

    run: RunState
    kinds: tuple[str, ...]
    master: bool
    """Whether the run has fp32 master weights beside its own."""

    distributed: bool
    expert_optimizer: bool
    progress: Mapping[str, Any]
    data_order: Any


@dataclass(frozen=True, kw_only=True)
class WithState:
    """Weights and an optimizer's tensors behind one face (``sources.Source``)."""

    weights: MegatronSource
    state: MegatronSource

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if kind_of(name) is not None else self.weights.dtype(name)

    def published(self, name: str) -> list[Tensor]:
        return self._of(name).published(weight_name(name))

    def parts(self, name: str) -> list[Tensor]:
        if kind_of(name) == MASTER and name not in self.state.rows:
            # The weights of a run in fp32 are what its master weights would be.
            return self.weights.parts(weight_name(name))
        return self._of(name).parts(name)

    def release(self, name: str) -> None:
        self._of(name).release(name if name in self._of(name).rows else weight_name(name))

    def _of(self, name: str) -> MegatronSource:
        return self.state if name in self.state.rows else self.weights


class _StateOf:
    """The optimizer's tensors of a checkpoint, as ``sources.WholeTensors``."""

    def __init__(self, checkpoint: HoldsState) -> None:
        self._checkpoint = checkpoint
        self.tensors = checkpoint.state
        self.read = checkpoint.read
        self.release = checkpoint.release


def carry(
    found: Optimizer, config: TrainingConfig, model: Model, weights: MegatronSource, *, distributed: bool
) -> tuple[Carried, Model, WithState]:
    """What to write of the optimizer ``found``, the model with its tensors, and where both come from.

    Raises ``CheckpointError`` when the state is not whole or is of another precision.
    """
    stored = sorted({kind for name in found.checkpoint.state if (kind := kind_of(name)) is not None})
    names = [name for name, row in model.rows.items() if not row.fp32]
    rows = {state_name(kind, name): model.rows[name] for kind in stored for name in names}
    state = MegatronSource(
        checkpoint=_StateOf(found.checkpoint), rows=rows, sizes=model.sizes, target=None, keeps_padding=True
    )
    ignored: set[str] = set()
    if not config.model.mtp_num_layers:
        # The weights that they belong to were left out; a message has named them.
        ignored = {name for name in found.checkpoint.state if weight_name(name).startswith("mtp.")}
    state.check(model.config.model, ignored)
    master = bool(config.train.bf16 or config.train.fp16)
    _check_precision(stored, names, weights, master=master)
    kinds = [kind for kind in stored if kind != MASTER]
    kinds += [MASTER] if master or distributed else []
    carried = Carried(
        run=found.run_state(),
        kinds=tuple(kinds),
        master=master,
        distributed=distributed,
        expert_optimizer=bool(
            config.model.num_moe_experts and config.parallel.expert_model_parallel_size > 1
        ),
        progress=found.progress,
        data_order=found.data_order,
    )
    further = {state_name(kind, name): model.rows[name] for kind in kinds for name in names}
    return carried, replace(model, rows={**model.rows, **further}), WithState(weights=weights, state=state)


def _check_precision(stored: list[str], names: list[str], weights: MegatronSource, *, master: bool) -> None:
    has_master = MASTER in stored
    kept = {weights.checkpoint.tensors[name].dtype for name in names}
    if kept == {torch.float32} and not (master and not has_master):
        return
    if has_master and master:
        return
    before = f"with{'' if has_master else 'out'} master weights and weights of " + ", ".join(
        sorted(str(each).removeprefix("torch.") for each in kept)
    )
    raise CheckpointError(
        f"the optimizer's state is of a run {before}, and the configuration says "
        f"{'bf16 or fp16' if master else 'fp32'}: it would not be the same run. Give the precision of the "
        "source, or leave --with-optimizer out to take the weights alone"
    )
