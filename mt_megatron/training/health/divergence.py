"""When a step counts as diverged.

Every judgement is made from values that all ranks have agreed on, so all ranks come to the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mt_megatron.errors import MtMegatronError

_STEPS_OF_MEAN = 100
_STEPS_BEFORE_SPIKES = 10


class DivergenceError(MtMegatronError):
    """A step diverged and the policy is to stop, or too many did; names iteration, reason, and where known
    rank and module."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is wrong with a step."""

    reason: str
    """In words, with the value."""

    not_finite: bool
    """Whether some number is NaN or infinite, so that a module can be named."""


class LossMean:
    """The running mean of the loss over the steps that were taken, the last hundred weighing most.

    ``value`` and ``steps`` are all of its state; a resumed run that sets both goes on to the bit.
    """

    def __init__(self, value: float = 0.0, steps: int = 0) -> None:
        self.value = value
        self.steps = steps

    def add(self, loss: float) -> None:
        """Take in the loss of one more step."""
        self.steps += 1
        self.value += (loss - self.value) / min(self.steps, _STEPS_OF_MEAN)


class DivergenceWatch:
    """Judges each step before its update."""

    def __init__(
        self,
        *,
        check_gradients: bool = True,
        grad_norm_limit: float | None = None,
        spike_factor: float | None = None,
        hysteresis: int = 2,
    ) -> None:
        self.mean = LossMean()
        self.check_gradients = check_gradients
        self._norm_limit = grad_norm_limit
        self._spike_factor = spike_factor
        self._hysteresis = hysteresis
        self._stuck_overflows = 0

    @property
    def needs_norm(self) -> bool:
        """Whether a step is judged by its gradient norm, whatever clipping needs."""
        return self.check_gradients or self._norm_limit is not None

    def remember(self) -> Callable[[], None]:
        """Keeps the mean and the count of overflows; what is returned brings them back."""
        value, steps, overflows = self.mean.value, self.mean.steps, self._stuck_overflows

        def restore() -> None:
            self.mean = LossMean(value, steps)
            self._stuck_overflows = overflows

        return restore

    def overflowed(self, *, scale_is_stuck: bool) -> Judgement | None:
        """Judge a step whose fp16 gradients overflowed. That is the usual way to find the loss scale,
        unless it cannot get smaller and overflows follow one another all the same."""
        self._stuck_overflows = self._stuck_overflows + 1 if scale_is_stuck else 0
        if self._stuck_overflows <= self._hysteresis:
            return None
        return Judgement(
            reason="fp16 gradients overflow although the loss scale cannot get smaller, "
            f"{self._stuck_overflows} steps in a row",
            not_finite=True,
        )

    def judge(self, *, loss: float, norm: float | None, norm_is_bad: bool) -> Judgement | None:
        """Judge a step by its loss and its gradient norm; None when it may go on."""
        self._stuck_overflows = 0
        if not math.isfinite(loss):
            return Judgement(reason=f"the loss is {loss}", not_finite=True)
        if norm_is_bad:
            return self._bad_norm(loss, norm)
        factor, mean = self._spike_factor, self.mean
        if factor is not None and mean.steps >= _STEPS_BEFORE_SPIKES and loss > factor * mean.value:
            return Judgement(
                reason=f"the loss is {loss:.4f}, more than {factor:g} x its running mean {mean.value:.4f}",
                not_finite=False,
            )
        return None

    def norm_is_bad(self, norm: float | None) -> bool:
        """Whether this rank finds the gradient norm unusable."""
        if norm is None:
            return False
        return not math.isfinite(norm) or (self._norm_limit is not None and norm > self._norm_limit)

    def _bad_norm(self, loss: float, norm: float | None) -> Judgement:
        finite = norm is not None and math.isfinite(norm)
        said = f"the gradient norm is {norm:.4g}" if norm is not None else "the gradient norm is not finite"
        if finite:
            return Judgement(
                reason=f"{said}, more than {self._norm_limit:g}; the loss is {loss:.4f}", not_finite=False
            )
        return Judgement(reason=f"{said} although the loss is {loss:.4f}", not_finite=True)
