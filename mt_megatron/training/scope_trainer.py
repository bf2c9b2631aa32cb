"""The trainer as the scope's pause, lab and generation see it (``mt_megatron.scope.trainer.Trainer``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.checkpoint.progress import Progress
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout
from mt_megatron.pipeline.execute.source import remember_step
from mt_megatron.training.distributed import Job
from mt_megatron.training.evaluate import Validation
from mt_megatron.training.health.watchdog import NoWatchdog, Watchdog
from mt_megatron.training.logging.moe_metrics import ExpertLoads
from mt_megatron.training.logging.throughput import Window
from mt_megatron.training.model import Trainable
from mt_megatron.training.step import AgreedWishes, Shape, Wishes
from mt_megatron.training.steps import Steps

if TYPE_CHECKING:
    from mt_megatron.scope.trainer import StepOutcome


class WhilePaused(Protocol):
    """Duties of a run in a pause: to save, to measure, to end."""

    def wishes(self) -> Wishes:
        """Of this rank."""

    def heed(self, agreed: AgreedWishes) -> None:
        """Save, measure, take in what was saved, as between any two steps; collective."""


class ScopeTrainer:
    """One rank of a run."""

    def __init__(
        self,
        trainable: Trainable,
        job: Job,
        steps: Steps,
        shape: Shape,
        *,
        watchdog: Watchdog | NoWatchdog,
        tokenizer: Any = None,
        loads: ExpertLoads | None = None,
        paused: WhilePaused | None = None,
    ) -> None:
        self.stopped: AgreedWishes | None = None
        """What the ranks agreed on in a pause that ended because the run is to end."""

        self.window: Window | None = None
        """The steps since the last report; the run sets it, and takes it back after an undo."""

        self.figures: tuple[float | None, Validation | None] = (None, None)
        """Loss of the last step and last validation, for the run's end; kept as ``window`` is."""

        self._made: Callable[[], Window] | None = None
        self.went_back = False
        """Whether the run has gone back to an earlier step since this was last set to False."""

        self._trainable = trainable
        self._job = job
        self._steps = steps
        self._shape = shape
        self._watchdog = watchdog
        self._tokenizer = tokenizer
        self._loads = loads
        self._paused = paused

    @property
    def refused(self) -> Mapping[str, str]:
        return {}

    @property
    def chunks(self) -> Sequence[Any]:
        return self._trainable.chunks

    @property
    def core(self) -> Any:
        return self._trainable.core

    @property
    def optimizer(self) -> Any:
        return self._trainable.optimizer

    @property
    def scheduler(self) -> Any:
        return self._trainable.scheduler

    @property
    def backend(self) -> Backend:
        return self._job.backend

    @property
    def layout(self) -> RankLayout:
        return self._job.layout

    @property
    def rank(self) -> int:
        return self._job.rank

    @property
    def at(self) -> Coordinates:
        return self._job.at

    @property
    def seq_length(self) -> int:
        return self._shape.seq_length

    @property
    def micro_batch_size(self) -> int:
        return self._shape.micro_batch_size

    @property
    def iteration(self) -> int:
        return self._steps.progress.iteration

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self._steps.progress

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def bare_chunks(self) -> list[torch.nn.Module]:
        return self._trainable.bare_chunks()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return self._job.sum_over_ranks(values)

    def rest(self, where: str) -> None:
        self._watchdog.unlimited(where)

    def wishes(self) -> tuple[bool, ...]:
        if self._paused is None:
            return ()
        wishes = self._paused.wishes()
        return wishes.stop, wishes.save_written, wishes.measure, wishes.leave, wishes.save

    def heed(self, counts: Sequence[int]) -> bool:
        if self._paused is None or not counts:
            return False
        stop, written, measure, leave, save = counts
        agreed = AgreedWishes(
            stop=stop > 0,
            save_written=written == self._job.layout.world_size,
            measure=measure > 0,
            leave=leave > 0,
            save=save > 0,
        )
        if agreed.stop:
            self.stopped = agreed
            return True
        self._paused.heed(agreed)
        return False

    def remember(self) -> Callable[[], None]:
        iteration = self.iteration
        restoring = [self._steps.remember(), remember_step()]
        if self._loads is not None:
            restoring.append(self._loads.remember())
        window = None if self.window is None else self.window.remember()
        figures = self.figures

        def restore() -> None:
            self.went_back |= self._steps.progress.iteration != iteration
            for each in restoring:
                each()
            self._trainable.update_is_half_done = False
            self.figures = figures
            if window is not None:
                self._made = window
                self.window = window()

        return restore

    def rehearse(self) -> StepOutcome:
        from mt_megatron.scope.trainer import StepOutcome

        result = self._steps.rehearse()
        return StepOutcome(
            loss=result.loss,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            reason=None if result.diverged is None else result.diverged.reason,
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        window = self.window
        if window is None:
            yield
            return
        with window.paused():
            yield
        if self.window is not window and self._made is not None:
            # The run went back meanwhile: what was left of the pause is no training of the new window.
            self.window = self._made()
