"""What follows a step that diverged: an error, the step without its update, or the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.config.schema import TrainConfig
from mt_megatron.errors import DIVERGENCE_ADVICE, CheckpointError
from mt_megatron.training.health.divergence import DivergenceError, Judgement


class Recovery:
    """Applies ``on_divergence``, no more often than ``max_divergences``.

    Every rank goes through the same calls with the same values.
    """

    def __init__(
        self,
        options: TrainConfig,
        *,
        say: Callable[[str], None],
        record: Callable[[str, int, dict[str, Any]], None],
    ) -> None:
        self._policy = options.on_divergence
        self._most = options.max_divergences
        self._say = say
        self._record = record

    def after(
        self,
        judgement: Judgement,
        progress: Progress,
        *,
        explain: Callable[[], str | None],
        roll_back: Callable[[], Progress],
        perturbed: str | None = None,
    ) -> Progress:
        """The progress to go on from, after a step that diverged; ``progress`` counts it as skipped.

        ``explain`` finds the first module that is not finite. ``roll_back`` loads the last good
        checkpoint and returns its progress. ``perturbed``: what the run is under, which ``explain`` leaves
        out. Raises ``DivergenceError`` when the run has to stop.
        """
        progress = replace(progress, divergences=progress.divergences + 1)
        found = self._describe(judgement, explain, perturbed)
        action = self._policy
        too_many = action != "stop" and progress.divergences > self._most
        values = {
            "reason": judgement.reason,
            "found": found,
            "action": "stop" if too_many else action,
            "divergences": progress.divergences,
        }
        self._record("divergence", progress.iteration, values)
        head = f"iteration {progress.iteration}: {judgement.reason}{'' if found is None else f'; {found}'}"
        if too_many:
            raise DivergenceError(
                f"{head}. More than {self._most} steps diverged (--max-divergences); the weights are those "
                f"of the last sound step. {DIVERGENCE_ADVICE}"
            )
        if action == "stop":
            raise DivergenceError(
                f"{head}. The weights are unchanged since the iteration before. {DIVERGENCE_ADVICE}; or let "
                "such steps be left out or undone with --on-divergence skip or rollback"
            )
        if action == "skip":
            self._say(f"{head}. Left out, {progress.divergences} of at most {self._most}")
            return progress
        return self._back(head, progress, roll_back)

    def _describe(
        self, judgement: Judgement, explain: Callable[[], str | None], perturbed: str | None
    ) -> str | None:
        if not judgement.not_finite:
            return None
        found = explain()
        if found is None and perturbed is not None:
            return (
                f"the same step repeated without what the run is perturbed by ({perturbed}) is finite: it "
                "comes from the perturbation, else from the memory or the device of a rank"
            )
        if found is None:
            return (
                "the same step repeated is finite, so neither data nor weights are at fault: suspect the "
                "memory or the device of a rank"
            )
        return f"first on {found}"

    def _back(self, head: str, progress: Progress, roll_back: Callable[[], Progress]) -> Progress:
        try:
            restored = roll_back()
        except CheckpointError as error:
            raise DivergenceError(f"{head}. It cannot be undone: {error}. {DIVERGENCE_ADVICE}") from error
        undone = progress.iteration - restored.iteration
        self._say(
            f"{head}. Back to the weights of step {restored.iteration}, on with the data after step "
            f"{progress.iteration}; {progress.divergences} of at most {self._most}"
        )
        # Steps and data go on from here: only what was learnt is that of the checkpoint.
        return replace(
            progress,
            skipped_iterations=restored.skipped_iterations + undone,
            loss_mean=restored.loss_mean,
            loss_mean_steps=restored.loss_mean_steps,
        )
