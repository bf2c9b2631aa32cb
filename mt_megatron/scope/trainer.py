"""Interface of the training program for pause, generation and lab: ``training.scope_trainer`` has it, and so
has ``launching.scripts.script_trainer`` for scripts of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Result of a step, the same on every rank."""

    loss: float
    """Nats per counted token; NaN where the step had none."""

    grad_norm: float | None
    skipped: bool
    reason: str | None = None
    """What is wrong with it; None when nothing is."""


class Tokenizer(Protocol):
    """Text to token ids and back, for generation."""

    vocab_size: int
    eod: int
    """Id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""


class Trainer(Protocol):
    """One rank of a training between two of its steps. Nothing of it is kept across them but itself."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Commands that this program cannot follow, and why."""

    @property
    def chunks(self) -> Sequence[Any]:
        """Model chunks, in their ``DistributedDataParallel`` where they have one."""

    @property
    def core(self) -> Any:
        """Their ``TransformerConfig``."""

    @property
    def optimizer(self) -> Any:
        """A ``MegatronOptimizer``."""

    @property
    def scheduler(self) -> Any:
        """An ``OptimizerParamScheduler``."""

    @property
    def backend(self) -> Backend: ...

    @property
    def layout(self) -> RankLayout: ...

    @property
    def rank(self) -> int: ...

    @property
    def at(self) -> Coordinates: ...

    @property
    def seq_length(self) -> int: ...

    @property
    def micro_batch_size(self) -> int: ...

    @property
    def iteration(self) -> int:
        """Completed steps."""

    @property
    def tokenizer(self) -> Any:
        """A ``Tokenizer``, or None."""

    def bare_chunks(self) -> list[torch.nn.Module]:
        """The chunks without wrappers."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks; collective."""

    def rest(self, where: str) -> None:
        """Tell the watchdog that the main thread is at ``where``, where it may stay."""

    def wishes(self) -> tuple[bool, ...]:
        """Wishes of this rank while the run is paused, the first of them that the run ends; the same number
        of entries on every rank."""

    def heed(self, counts: Sequence[int]) -> bool:
        """Do what ranks want: ``counts`` of them for each entry of ``wishes``; collective. True: the pause
        must end, since the run ends."""

    def remember(self) -> Callable[[], None]:
        """Keep what this program counts: progress, data position, means, figures of the log. What is returned
        brings it back, as often as it is called."""

    def rehearse(self) -> StepOutcome:
        """Make the next step without counting it; collective. Whoever asks for it puts everything back."""

    def aside(self) -> AbstractContextManager[None]:
        """What happens within is no training: it does not count in the reported speed."""
