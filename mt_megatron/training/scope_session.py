"""A program's part of MegaScope: where the recording of a run goes, and what a step does for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mt_megatron.errors import ConfigError
from mt_megatron.training.run_folder import agreed_folder, run_folder

if TYPE_CHECKING:
    from mt_megatron.config.schema import TrainingConfig
    from mt_megatron.data.loader.tokenizer import TokenizerLike
    from mt_megatron.scope.control.control import Control
    from mt_megatron.scope.interfaces import StepFigures
    from mt_megatron.scope.session import Session
    from mt_megatron.scope.trainer import Trainer
    from mt_megatron.training.distributed import Job
    from mt_megatron.training.model import Trainable
    from mt_megatron.training.step import StepResult


class Scope:
    """The recording that ``--scope`` asks for; with ``off``, or without a folder, it does nothing at all."""

    def __init__(self, session: Session | None = None, *, lab_file: str | None = None) -> None:
        self.session = session
        """None where nothing is watched."""

        self.control: Control | None = None
        """Commands and perturbations; None before ``command``."""

        self._lab_file = lab_file
        self._began_perturbed: str | None = None

    def command(
        self,
        trainer: Trainer,
        *,
        pause_minutes: float,
        say: Callable[[str], None],
        began_perturbed: str | None = None,
    ) -> None:
        """Let the run be commanded and perturbed; before ``start``. ``began_perturbed``: what the weights
        that it begins with were saved under."""
        self._began_perturbed = began_perturbed
        session = self.session
        if session is None:
            return
        from mt_megatron.scope.control.control import Control
        from mt_megatron.scope.lab.lab import Lab

        folder = session.run / "scope"
        lab = Lab(
            trainer,
            folder=folder,
            say=say,
            around_step=session.around_step,
            went_back=session.went_back,
            began_perturbed=began_perturbed,
        )
        self.control = session.control = Control(
            trainer,
            lab=lab,
            folder=folder,
            say=say,
            answer=session.answer,
            handlers={"request": session.handle_request},
            pause_minutes=pause_minutes,
        )

    def start(self) -> None:
        """Begin; collective. Raises ``ConfigError`` on all ranks for perturbations that the model cannot
        have."""
        if self.session is not None:
            self.session.start()
        if self._lab_file is None:
            return
        from mt_megatron.scope.lab.agreement import read_alike

        if self.control is None or self.session is None or not self.session.is_on:
            raise ConfigError(
                f"--scope-lab {self._lab_file}: nothing is recorded, so nothing can be perturbed; expected "
                "a folder. Give --save or --scope-dir"
            )
        try:
            self.control.lab.arm_file(read_alike(self._lab_file))
        except ConfigError as error:
            raise ConfigError(f"--scope-lab {self._lab_file}: {error}") from error

    def begin_step(self, iteration: int) -> None:
        """``iteration`` begins."""
        if self.session is not None:
            self.session.begin_step(iteration)

    def updating(self, optimizer: Any) -> bool:
        """``optimizer`` is about to update, where it was not known at the start. False: norms are recorded of
        another one."""
        return self.session is None or self.session.updating(optimizer)

    def gradients_ready(self) -> None:
        """Gradients are reduced and unscaled, not yet clipped."""
        if self.session is not None:
            self.session.gradients_ready()

    def updated(self, *, skipped: bool) -> None:
        """The update was made, or left out."""
        if self.session is not None:
            self.session.updated(skipped=skipped)

    def end_step(self, iteration: int, result: StepResult | StepFigures | None) -> None:
        """``iteration`` is over; without a result where it raised an error."""
        if self.session is None:
            return
        from mt_megatron.scope.interfaces import StepFigures

        self.session.end_step(
            iteration,
            None
            if result is None
            else StepFigures(
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens=result.tokens,
                skipped=result.skipped,
            ),
        )

    def validated(self, iteration: int, *, loss: float, tokens: int) -> None:
        """The model after ``iteration`` was evaluated: mean ``loss`` [nats] over ``tokens``."""
        if self.session is not None:
            self.session.validated(iteration, loss=loss, tokens=tokens)

    def diverged(self, iteration: int, reason: str) -> bool:
        """Whether the step diverged under a perturbation that can be undone, and was."""
        return self.control is not None and self.control.lab.diverged(iteration, reason)

    def rolled_back(self, iteration: int, perturbed: str | None) -> None:
        """The weights are those of the checkpoint of ``iteration`` again, saved under ``perturbed``."""
        self._began_perturbed = perturbed
        if self.control is not None:
            self.control.lab.rolled_back(iteration, perturbed)

    @property
    def recorded(self) -> Path | None:
        """Folder of the run where something is recorded; None: nothing is."""
        return self.session.run if self.session is not None and self.session.is_on else None

    @property
    def perturbed(self) -> str | None:
        """What the run is under; None: nothing."""
        return self._began_perturbed if self.control is None else self.control.lab.perturbed

    @property
    def withholds_checkpoints(self) -> bool:
        """Whether none is to be written, since the run can be taken back from what it is under."""
        return self.control is not None and self.control.lab.withholds_checkpoints

    def undo_before_end(self) -> int | None:
        """Take back what the run is under before it ends; the step that it is at then, None where nothing is.
        Local."""
        return None if self.control is None else self.control.lab.undo_before_end()

    @property
    def wants_attention(self) -> bool:
        """Whether this rank was commanded something."""
        return self.session is not None and self.session.wants_attention

    def attend(self) -> None:
        """Do what was commanded; collective, once all ranks have agreed to."""
        if self.session is not None:
            self.session.attend()

    def close(self) -> None:
        """End it; no collective."""
        if self.session is not None:
            self.session.close()


def _of_any_rank(problem: str | None, job: Job) -> str | None:
    """The first rank's ``problem`` that has one; collective, since ``Session.start`` is."""
    said = [problem]
    if job.layout.world_size > 1:
        said *= job.layout.world_size
        dist.all_gather_object(said, problem)
    return next((each for each in said if each is not None), None)


def scope_of(
    config: TrainingConfig,
    job: Job,
    trainable: Trainable,
    *,
    tokenizer: TokenizerLike,
    metrics: Path | None,
    seq_length: int,
    say: Callable[[str], None],
) -> Scope:
    """What ``config`` asks to be watched; nothing is started yet. Collective. ``metrics``: the run's JSONL
    file."""
    scope, model = config.scope, config.model
    if scope.scope == "off":
        return Scope(lab_file=scope.scope_lab)
    folder = agreed_folder(run_folder(scope.scope_dir, metrics), job.layout.world_size)
    if folder is None:
        say("nothing is recorded of the model's inside: give --save or --scope-dir (or --scope off)")
        return Scope(lab_file=scope.scope_lab)
    # Not earlier: a run that is not watched need not load any of it.
    missing: str | None = None
    try:
        from mt_megatron.scope.interfaces import Facts, Options
        from mt_megatron.scope.session import Session
    except ImportError as error:
        missing = f"rank {job.rank}: {error}"
    missing = _of_any_rank(missing, job)
    if missing is not None:
        say(f"scope: nothing is recorded, training goes on: {missing}. Install mt_megatron again")
        return Scope(lab_file=scope.scope_lab)
    return Scope(
        Session(
            folder,
            rank=job.rank,
            layout=job.layout,
            backend=job.backend,
            chunks=trainable.chunks,
            optimizer=trainable.optimizer,
            options=Options(
                live=scope.scope == "live",
                interval=scope.scope_interval,
                watch=scope.scope_watch,
                port=scope.scope_port,
                retain_mib=scope.scope_retain_mib,
                sinks=scope.scope_sink,
            ),
            facts=Facts(
                micro_batch_size=config.train.micro_batch_size,
                global_batch_size=config.global_batch_size(job.layout.world_size),
                seq_length=seq_length,
                vocab_size=model.vocab_size,
                model={
                    "name": model.preset or model.family,
                    "num_layers": model.num_layers,
                    "hidden_size": model.hidden_size,
                    "num_attention_heads": model.num_attention_heads,
                    "num_query_groups": model.num_query_groups,
                    "num_experts": model.num_moe_experts,
                    "vocab_size": model.vocab_size,
                    "seq_length": seq_length,
                    "micro_batch_size": config.train.micro_batch_size,
                    "params_dtype": config.params_dtype,
                    "interval": scope.scope_interval,
                    "train_iters": config.train.train_iters,
                    "tokenizer": {
                        "type": config.data.tokenizer_type,
                        "model": config.data.tokenizer_model and os.path.abspath(config.data.tokenizer_model),
                        "identity": tokenizer.identity,
                    },
                },
            ),
            say=say,
        ),
        lab_file=scope.scope_lab,
    )
