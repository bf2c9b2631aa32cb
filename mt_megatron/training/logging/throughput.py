"""How fast the steps since the last report were: tokens, operations, share of the device's peak."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.training.step import StepResult


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What MFU is measured against."""

    flops: float | None
    """Dense operations per second of one device; None when nobody knows."""

    source: str
    """Where the figure is from, or what to do about there being none."""


def peak_of(config: TrainingConfig, backend: Backend) -> Peak:
    """``--peak-tflops`` if given, else the backend's table for the parameters' dtype."""
    given = config.logging.peak_tflops
    if given is not None:
        return Peak(flops=given * 1e12, source="--peak-tflops")
    flops = backend.peak_flops(getattr(torch, config.params_dtype))
    if flops is not None:
        return Peak(flops=flops, source=f"table of {backend.name}, {config.params_dtype}, dense")
    return Peak(flops=None, source="unknown peak, give --peak-tflops")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Averages over the steps of a window."""

    tokens_per_second: float
    """Tokens that count towards the loss, over all processes."""

    step_seconds: float
    """Seconds of one step."""

    flops_per_second_per_device: float
    """Of the model (``ModelFamily.flops``), for every token of the batch; recomputation is not counted."""

    mfu: float | None
    """That over the peak, 0 to 1; None without a peak."""

    communication_share: float | None
    """Share of the time that this process spent in communication, 0 to 1; None when not measured."""


class Window:
    """The steps since the last report, and the time they took."""

    def __init__(
        self,
        *,
        communication: Callable[[], float] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``communication`` tells the seconds spent in communication so far; None: not measured."""
        self.results: list[StepResult] = []
        self.tokens_processed = 0
        self._communication = communication
        self._now = now
        self._began, self._communicated = self._clocks()
        self._pause: tuple[float, float] | None = None
        """Both clocks at the begin of the pause; None outside of one."""

    def add(self, result: StepResult, *, tokens_processed: int) -> None:
        """One more step; ``tokens_processed`` is the whole global batch, tokens without a loss included."""
        self.results.append(result)
        self.tokens_processed += tokens_processed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within is no training's: it does not slow down the reported speed. A pause within a pause is
        part of it."""
        if self._pause is not None:
            yield
            return
        self._pause = self._clocks()
        try:
            yield
        finally:
            time_spent, communicated = self._spent()
            self._pause = None
            now, communicating = self._clocks()
            self._began, self._communicated = now - time_spent, communicating - communicated

    def _clocks(self) -> tuple[float, float]:
        """Time, and seconds in communication so far."""
        return self._now(), 0.0 if self._communication is None else self._communication()

    def _spent(self) -> tuple[float, float]:
        """Seconds of training and of its communication, without the pause under way."""
        now, communicating = self._clocks() if self._pause is None else self._pause
        return now - self._began, communicating - self._communicated

    def remember(self) -> Callable[[], Window]:
        """Keeps the steps so far and the time that they took; what is returned makes a window that goes on
        from there."""
        results, tokens = list(self.results), self.tokens_processed
        took, spent = self._spent()

        def made() -> Window:
            window = Window(communication=self._communication, now=self._now)
            window.results, window.tokens_processed = list(results), tokens
            window._began -= took
            window._communicated -= spent
            return window

        return made

    def loss(self) -> float:
        """Mean of the steps' losses; one that was not finite is not in it. NaN when none was."""
        losses = [result.loss for result in self.results if math.isfinite(result.loss)]
        return sum(losses) / len(losses) if losses else math.nan

    def speed(self, *, flops_per_token: float, world_size: int, peak: Peak) -> Speed:
        """What the steps so far come to; there must be one."""
        spent, communicated = self._spent()
        seconds = max(spent, 1e-9)
        flops = flops_per_token * self.tokens_processed / seconds / world_size
        return Speed(
            tokens_per_second=sum(result.tokens for result in self.results) / seconds,
            step_seconds=seconds / len(self.results),
            flops_per_second_per_device=flops,
            mfu=None if peak.flops is None else flops / peak.flops,
            communication_share=None if self._communication is None else min(1.0, communicated / seconds),
        )
