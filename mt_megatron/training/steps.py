"""The steps of a run one after another: their batches, their size, and what is done about a bad one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.config.rampup import BatchSizes
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.batches import train_batches
from mt_megatron.data.loader.datasets import SampleDataset
from mt_megatron.fp8.checkpoint import begin_at as fp8_begin_at
from mt_megatron.fp8.state import states_of, unmeasured
from mt_megatron.pipeline.execute.source import remember_step
from mt_megatron.seams import events
from mt_megatron.seams.schedule import ForwardStep
from mt_megatron.training.distributed import Job
from mt_megatron.training.health.divergence import DivergenceWatch, LossMean
from mt_megatron.training.health.recovery import Recovery
from mt_megatron.training.health.watchdog import NoWatchdog, Watchdog
from mt_megatron.training.model import Trainable
from mt_megatron.training.nan_watch import RandomStates, first_finding
from mt_megatron.training.step import (
    Batches,
    NoObserver,
    Shape,
    StepObserver,
    StepResult,
    Wishes,
    train_step,
)
from mt_megatron.training.update import loss_scales


class RunObserver(StepObserver, Protocol):
    """Listener to the steps of a run."""

    def begin_step(self, iteration: int) -> None:
        """``iteration`` begins."""

    def end_step(self, iteration: int, result: StepResult | None) -> None:
        """``iteration`` is over; without a result where it raised an error."""

    def diverged(self, iteration: int, reason: str) -> bool:
        """Whether a step that diverged is no matter for the run: it goes back to before it was perturbed. The
        same on all ranks."""

    @property
    def perturbed(self) -> str | None:
        """Perturbations that the run is under, the same on all ranks; None for none."""


class NotObserved(NoObserver):
    """Hears of it and does nothing."""

    def begin_step(self, iteration: int) -> None:
        pass

    def end_step(self, iteration: int, result: StepResult | None) -> None:
        pass

    def diverged(self, iteration: int, reason: str) -> bool:
        return False

    @property
    def perturbed(self) -> str | None:
        return None


class Steps:
    """Takes one step after another from ``progress`` on; collective."""

    def __init__(
        self,
        config: TrainingConfig,
        job: Job,
        trainable: Trainable,
        forward_step: ForwardStep,
        dataset: SampleDataset,
        progress: Progress,
        *,
        shape: Shape,
        sizes: BatchSizes,
        recovery: Recovery,
        roll_back: Callable[[], Progress],
        watchdog: Watchdog | NoWatchdog,
        observer: RunObserver | None = None,
    ) -> None:
        """``shape`` is a step's after the ramp that ``sizes`` describes; ``roll_back`` loads the last good
        checkpoint and returns its progress."""
        self.progress = progress
        self._config = config
        self._job = job
        self._trainable = trainable
        self._forward_step = forward_step
        self._dataset = dataset
        self._shape = shape
        self._sizes = sizes
        self._recovery = recovery
        self._roll_back = roll_back
        self._watchdog = watchdog
        self.observer: RunObserver = observer or NotObserved()
        self.undo_first: Callable[[], object] = lambda: None
        """What takes back perturbations, before the weights are saved after an error; no collective."""

        self._watch = DivergenceWatch(
            check_gradients=config.ddp.check_for_nan_in_grad,
            grad_norm_limit=config.train.grad_norm_threshold,
            spike_factor=config.train.loss_spike_factor,
            hysteresis=config.optimizer.hysteresis,
        )
        self._watch.mean = LossMean(progress.loss_mean, progress.loss_mean_steps)
        self._draws = draws_in_steps(config)
        self._fp8_before: list[Callable[[], None]] = []
        self._is_first = True
        self._undo: Callable[[], None] | None = None
        self._again = remember_step()
        """Gives a pipeline schedule that goes by steps the number of the step that was begun last."""
        self._batches = self._batches_after(progress, num_workers=config.data.num_workers)

    def take(self, wishes: Callable[[], Wishes]) -> StepResult:
        """One step, and what follows when it diverged. Moves ``progress`` on. ``wishes`` is asked when the
        gradients are there.

        Raises ``DivergenceError`` on every rank when the run has to stop.
        """
        before, iteration = self.progress, self.progress.iteration + 1
        rounds = self._sizes.at(before.consumed_samples) // self._shape.micro_batch_size
        shape = replace(self._shape, num_microbatches=rounds // self._job.layout.dp)
        random_states = RandomStates.now(self._job) if self._draws else None
        self._undo = self._undoing(before, random_states)
        self._again = remember_step()
        # Kernels are compiled and data loaders started in the first step of a process.
        limited = self._watchdog.long_progress if self._is_first else self._watchdog.progress
        limited(f"step {iteration}")
        result: StepResult | None = None
        self.observer.begin_step(iteration)
        try:
            with events.span("step", iteration=iteration):
                result = train_step(
                    self._trainable,
                    self._forward_step,
                    self._batches,
                    shape,
                    self._job,
                    iteration=iteration,
                    wishes=wishes,
                    watch=self._watch,
                    observer=self.observer,
                )
        finally:
            self.observer.end_step(iteration, result)
        self._watchdog.long_progress(f"after step {iteration}")
        self._is_first = False
        self._advance(result)
        if result.diverged is not None and not self.observer.diverged(iteration, result.diverged.reason):
            for restore in self._fp8_before:
                # The step is left out, and with it its magnitudes and what was demoted for them.
                restore()
            self.progress = self._recovery.after(
                result.diverged,
                self.progress,
                explain=lambda: self._explain(before, shape, random_states),
                roll_back=self._roll_back,
                perturbed=self.observer.perturbed,
            )
            # Steps go on from here, after a rollback too.
            fp8_begin_at(self._trainable.chunks, self.progress.iteration)
            self._watch.mean = LossMean(self.progress.loss_mean, self.progress.loss_mean_steps)
        self._undo = None
        return result

    @property
    def update_is_half_done(self) -> bool:
        """Whether an update was begun and not ended: the weights are those of no step."""
        return self._trainable.update_is_half_done

    def back_to_last_sound(self) -> Progress:
        """The progress whose weights are live, after a step that raised an error before its update or after
        one that was completed. Random states and the loss scale go back to where they were then."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        self.undo_first()
        return self.progress

    def remember(self) -> Callable[[], None]:
        """Keeps how far the run is: progress, running mean, judgement, position in the data. What is returned
        goes back there, as often as it is called; weights and random states are not its business."""
        progress, watch = self.progress, self._watch.remember()

        def go_back() -> None:
            if self.progress != progress:
                self._batches = self._batches_after(progress, num_workers=self._config.data.num_workers)
            self.progress = progress
            self._undo = None
            watch()

        return go_back

    def rehearse(self) -> StepResult:
        """The next step, made from the same samples without moving on; collective. Weights, optimizer and
        random states are changed as by a step: whoever asks for it puts them back."""
        before, iteration = self.progress, self.progress.iteration + 1
        rounds = self._sizes.at(before.consumed_samples) // self._shape.micro_batch_size
        restore = self._watch.remember()
        self._watchdog.long_progress(f"step {iteration}, made beside the run")
        try:
            with unmeasured(states_of(self._trainable.chunks)):
                return train_step(
                    self._trainable,
                    self._forward_step,
                    self._batches_after(before, num_workers=0),
                    replace(self._shape, num_microbatches=rounds // self._job.layout.dp),
                    self._job,
                    iteration=iteration,
                    watch=self._watch,
                    observer=self.observer,
                )
        finally:
            restore()

    def _undoing(self, before: Progress, states: RandomStates | None) -> Callable[[], None]:
        """Takes back what a step changes before its update."""
        scales = loss_scales(self._trainable.optimizer)
        self._fp8_before = fp8 = [state.snapshot() for state in states_of(self._trainable.chunks)]

        def undo() -> None:
            self.progress = before
            for restore in fp8:
                restore()
            self._watch.mean = LossMean(before.loss_mean, before.loss_mean_steps)
            scales()
            if states is not None:
                states.restore(self._job)

        return undo

    def _advance(self, result: StepResult) -> None:
        done = self.progress
        self.progress = replace(
            done,
            iteration=done.iteration + 1,
            consumed_samples=done.consumed_samples + result.samples,
            consumed_tokens=done.consumed_tokens + result.tokens,
            skipped_iterations=done.skipped_iterations + result.skipped,
            loss_mean=self._watch.mean.value,
            loss_mean_steps=self._watch.mean.steps,
        )

    def _explain(self, before: Progress, shape: Shape, random_states: RandomStates | None) -> str | None:
        """Which module made the step after ``before`` not finite; leaves no trace."""
        after, next_step = RandomStates.now(self._job), remember_step()
        states = states_of(self._trainable.chunks)
        fp8 = [state.snapshot() for state in states]
        for restore in self._fp8_before:
            restore()
        if random_states is not None:
            random_states.restore(self._job)
        self._again()
        try:
            batches = self._batches_after(before, num_workers=0)
            with unmeasured(states):
                return first_finding(self._trainable, self._forward_step, batches, shape, self._job)
        finally:
            after.restore(self._job)
            next_step()
            for restore in fp8:
                restore()

    def _batches_after(self, progress: Progress, *, num_workers: int) -> Batches:
        return [
            train_batches(
                self._dataset,
                consumed_samples=progress.consumed_samples,
                micro_batch_size=self._shape.micro_batch_size,
                data_parallel_rank=self._job.at.dp,
                data_parallel_size=self._job.layout.dp,
                num_workers=num_workers,
                pin_memory=self._job.backend.pins_host_memory(),
            )
            for _ in self._trainable.chunks
        ]


def draws_in_steps(config: TrainingConfig) -> bool:
    """Whether a step draws random numbers, which belong to what is taken back with it."""
    model = config.model
    jitter = model.num_moe_experts is not None and model.moe_input_jitter_eps is not None
    return model.hidden_dropout > 0 or model.attention_dropout > 0 or jitter


def touching(watchdog: Watchdog | NoWatchdog, forward_step: ForwardStep) -> ForwardStep:
    """``forward_step`` that shows ``watchdog`` each micro-batch."""

    def forward(batches: Iterator[Any], model: torch.nn.Module) -> Any:
        watchdog.touch()
        return forward_step(batches, model)

    return forward
