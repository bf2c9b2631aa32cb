"""A training run from its configuration to its last checkpoint and its figures."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import mt_megatron
from mt_megatron.checkpoint import run_lock as checkpoint_lock
from mt_megatron.checkpoint.load import Progress, read_manifest
from mt_megatron.checkpoint.save import SaveReport
from mt_megatron.checkpoint.store import CheckpointStore
from mt_megatron.config.rampup import batch_sizes
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.datasets import (
    Datasets,
    build_datasets,
    has_order,
    order_fingerprint,
    unused_test_data,
)
from mt_megatron.data.loader.sample_need import require_samples
from mt_megatron.data.loader.tokenizer import load_tokenizer
from mt_megatron.data.prepare.sidecar import recorded_ends
from mt_megatron.errors import CheckpointError, DataError
from mt_megatron.models.families import family_of
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.parameters import count_parameters
from mt_megatron.seams import transport
from mt_megatron.training.depth_losses import depth_values
from mt_megatron.training.distributed import Job, joined, require_precision, world_size
from mt_megatron.training.evaluate import Validation, evaluate
from mt_megatron.training.health.recovery import Recovery
from mt_megatron.training.health.shared_error import save_last_sound_step
from mt_megatron.training.health.watchdog import NoWatchdog, Watchdog, watched
from mt_megatron.training.init_from_hf import init_from_hf
from mt_megatron.training.logging.fp8_records import Fp8Records
from mt_megatron.training.logging.metrics import perplexity
from mt_megatron.training.logging.moe_metrics import ExpertLoads
from mt_megatron.training.logging.output import Output
from mt_megatron.training.logging.summary import (
    Outcome,
    corpus_baselines,
    layout_text,
    next_lines,
    summary_lines,
)
from mt_megatron.training.logging.throughput import Window
from mt_megatron.training.model import Trainable, build
from mt_megatron.training.preflight import (
    check_batch_size,
    check_before_start,
    check_document_end,
    check_folder,
    check_origin,
    origin,
)
from mt_megatron.training.scan_session import tracing_of
from mt_megatron.training.scope_session import scope_of
from mt_megatron.training.scope_trainer import ScopeTrainer
from mt_megatron.training.signals import stop_requests
from mt_megatron.training.step import AgreedWishes, Shape, StepResult, Wishes, make_forward_step
from mt_megatron.training.steps import Steps, touching


def train(config: TrainingConfig) -> Outcome:
    """Run ``config`` on the backend that Megatron is patched for; collective.

    Call ``mt_megatron.training.validate.validate`` and ``mt_megatron.patch`` first. Raises an
    ``MtMegatronError``; checkpoints that were completed stay.
    """
    backend = mt_megatron.backend()
    require_precision(config, backend)
    found = check_before_start(config, backend, world_size())
    config = replace(config, notes=(*config.notes, *found))
    started = time.monotonic()
    with (
        joined(config, backend) as job,
        stop_requests() as stop_requested,
        watched(
            config.launch.watchdog_seconds,
            rank=job.rank,
            world_size=job.layout.world_size,
            closing_seconds=60 * config.launch.distributed_timeout_minutes,
        ) as watchdog,
        checkpoint_lock.held(config, job) as unlocked,
    ):
        mt_megatron.compare_plan_across_ranks()
        config = replace(config, notes=(*config.notes, *unlocked))
        run = _Run(config, job, started, watchdog, alone=not unlocked)
        try:
            return run.run(stop_requested)
        finally:
            run.close()


class _Run:
    """The state of one run. It is made whole by ``__init__`` and used up by ``run``."""

    def __init__(
        self,
        config: TrainingConfig,
        job: Job,
        started: float,
        watchdog: Watchdog | NoWatchdog,
        *,
        alone: bool,
    ) -> None:
        tokenizer = load_tokenizer(config.data, vocab_size=config.model.vocab_size)
        if config.model.vocab_size is None:
            config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
        self._watchdog = watchdog
        self.config = config
        self.job = job
        self.tokenizer = tokenizer
        self.started = started
        self.train_iters = _required(config.train.train_iters, "train_iters")
        self.global_batch_size = config.global_batch_size(job.layout.world_size)
        self.batch_sizes = batch_sizes(config.train.rampup_batch_size, self.global_batch_size)
        self.shape = Shape(
            num_microbatches=config.num_microbatches(job.layout.world_size),
            micro_batch_size=config.train.micro_batch_size,
            seq_length=_required(config.train.seq_length, "seq_length"),
        )
        family = family_of(config)
        self.flops_per_token = family.flops(config)
        self.output = Output(config, job, train_iters=self.train_iters, flops_per_token=self.flops_per_token)
        self.display, self.metrics = self.output.display, self.output.records
        for note in (*config.notes, *filter(None, [unused_test_data(config.data)])):
            self.display.say(note)
        self.forward_step = touching(
            watchdog, make_forward_step(family, job.backend.device(job.backend.current_device()))
        )
        self.datasets = self._datasets()
        self.trainable: Trainable = build(config, job, family)
        Fp8Records(config, job, self.trainable.chunks, self.display.say)
        self.expert_loads = ExpertLoads(self.trainable, job)
        self.manifest = {
            "config": config.to_show().to_dict(),
            "patches": json.loads(mt_megatron.report().to_json()),
            "data_order": order_fingerprint(self.datasets.train),
            "origin": origin(config, tokenizer),
            "tokenizer": {
                "eod": tokenizer.eod,
                "eod_token": getattr(tokenizer, "eod_token", None),
                "data_ends": recorded_ends(config),
            },
        }
        self.store = CheckpointStore(
            config.checkpoint,
            self.trainable,
            job,
            self.manifest,
            self.display.say,
            alone=alone,
            touch=watchdog.touch,
        )
        self.checkpoint: Path | None = None
        self.began_perturbed: str | None = None
        """Perturbations that the weights were saved under with which the run begins."""

        self.validation: Validation | None = None
        self.steps = Steps(
            config,
            job,
            self.trainable,
            self.forward_step,
            self.datasets.train,
            self._resume(),
            shape=self.shape,
            sizes=self.batch_sizes,
            recovery=Recovery(config.train, say=self.display.say, record=self.metrics.record),
            roll_back=self._roll_back,
            watchdog=watchdog,
        )
        self._announce()
        self._begin_policy()
        self.tracing = tracing_of(
            config,
            job,
            metrics=self.output.metrics_path,
            modules=self.trainable.chunks,
            num_microbatches=self.shape.num_microbatches,
            say=self.display.say,
        )

        self.scope = scope_of(
            config,
            job,
            self.trainable,
            tokenizer=tokenizer,
            metrics=self.output.metrics_path,
            seq_length=self.shape.seq_length,
            say=self.display.say,
        )
        self.steps.observer = self.scope
        self.scope_trainer = ScopeTrainer(
            self.trainable,
            job,
            self.steps,
            self.shape,
            watchdog=watchdog,
            tokenizer=tokenizer,
            loads=self.expert_loads,
            paused=self,
        )
        self.scope.command(
            self.scope_trainer,
            pause_minutes=config.scope.scope_pause_minutes,
            say=self.display.say,
            began_perturbed=self.began_perturbed,
        )
        self.stop_requested: threading.Event | None = None

    @property
    def progress(self) -> Progress:
        return self.steps.progress

    def close(self) -> None:
        self.scope.close()
        self.tracing.close()
        self.store.close()
        self.output.close()

    def run(self, stop_requested: threading.Event) -> Outcome:
        try:
            outcome = self._train(stop_requested)
        except Exception as error:
            self._watchdog.ending(f"after {type(error).__name__}")
            self.steps.undo_first = self._undo_perturbations
            self._saved(save_last_sound_step(error, self.steps, self.store, self.display.say))
            raise
        self.store.raise_if_lost()
        return outcome

    def _train(self, stop_requested: threading.Event) -> Outcome:
        result: StepResult | None = None
        self.stop_requested = stop_requested
        self.tracing.start()
        self.scope.start()
        window = self.output.window()
        if self._finished():
            self.display.say(
                f"nothing is left to train: {self.progress.iteration} of {self.train_iters} steps are done; "
                "a larger --train-iters trains on"
            )
        while not self._finished():
            self.scope_trainer.window, self.scope_trainer.went_back = window, False
            result = self.steps.take(self.wishes)
            if self.scope_trainer.went_back:
                # It diverged under a perturbation, which is undone: the step is none of the run's.
                window = self.scope_trainer.window
                continue
            self.scope_trainer.figures = (result.loss, self.scope_trainer.figures[1])
            self._saved(self.store.advance(result.wishes, sound=not result.skipped))
            window.add(result, tokens_processed=result.samples * self.shape.seq_length)
            self.display.tick(self.progress.iteration)
            if self._due(self.config.logging.log_interval):
                self._report(window, result)
                window = self.output.window()
            else:
                self.output.between(self.progress, window, result)
            if result.wishes.stop or self._due(self.config.train.exit_interval):
                break
            with window.paused():
                if result.wishes.measure:
                    self.tracing.measure()
                if self.store.is_due(self.progress, result.wishes):
                    self._save_on_the_way()
                if self._due(self.config.train.eval_interval) and not self._finished():
                    self._evaluate()
            if result.wishes.attend:
                self.scope_trainer.window = window
                result = self._attend(result)
                window = self.scope_trainer.window
                if result.wishes.stop:
                    break
        if result is not None:
            if window.results:
                self._report(window, window.results[-1])
            self._end_perturbations()
            # Whoever asked for the end waits for this; nothing older goes then.
            self._saved(self.store.save(self.progress, final=True, read_back=not result.wishes.stop))
        if result is not None and result.wishes.stop:
            # Whoever asked is waiting: every rank agreed on this with the loss.
            self.display.say(f"stopped on request after step {self.progress.iteration}")
        else:
            self._evaluate()
        loss, self.validation = self.scope_trainer.figures
        self._summary(loss)
        # A start without a step recorded nothing that a report could show.
        trace, recorded = (None, None) if result is None else (self.tracing.folder, self.scope.recorded)
        for line in next_lines(self.config, self.progress.iteration, self.checkpoint, trace, recorded):
            self.display.say(line)
        return Outcome(
            progress=self.progress,
            finished=self._finished(),
            loss=loss,
            validation=self.validation,
            checkpoint=self.checkpoint,
            # Nothing is left to do elsewhere where this was the last step.
            straggler=result is not None and result.wishes.leave and not self._finished(),
        )

    def wishes(self) -> Wishes:
        """What this rank wants now."""
        leave = self.tracing.wants_to_leave
        asked = self.stop_requested is not None and self.stop_requested.is_set()
        return Wishes(
            stop=asked or self._out_of_time() or leave,
            save_written=self.store.has_written(),
            measure=self.tracing.wants_measurement,
            leave=leave,
            save=self.store.wants_to_save(),
            attend=self.scope.wants_attention,
        )

    def heed(self, agreed: AgreedWishes) -> None:
        """What is done for all ranks' wishes while the run is paused."""
        self._saved(self.store.advance(agreed, sound=False))
        if agreed.measure:
            self.tracing.measure()
        if agreed.save:
            self._save_on_the_way()

    def _attend(self, result: StepResult) -> StepResult:
        """Do what was commanded after ``result``; the run may go back, or end in a pause."""
        with self.scope_trainer.aside():
            self.scope.attend()
        stopped = self.scope_trainer.stopped
        return result if stopped is None else replace(result, wishes=stopped)

    def _save_on_the_way(self) -> None:
        if not self.scope.withholds_checkpoints:
            self.store.note("perturbed", self.scope.perturbed)
            self._saved(self.store.save(self.progress))
            return
        self.store.put_off()
        self.display.say(
            f"step {self.progress.iteration}: no checkpoint is written while the run is perturbed "
            f"({self.scope.perturbed})"
        )

    def _roll_back(self) -> Progress:
        progress = self.store.rollback()
        assert self.store.newest is not None
        self.scope.rolled_back(progress.iteration, read_manifest(self.store.newest).get("perturbed"))
        return progress

    def _undo_perturbations(self) -> int | None:
        """Take back what can be; manifests of later checkpoints say what cannot. The step that the run is at
        then; None where nothing was taken back."""
        step = self.scope.undo_before_end()
        self.store.note("perturbed", self.scope.perturbed)
        return step

    def _end_perturbations(self) -> None:
        before, step = self.progress.iteration, self._undo_perturbations()
        if step is not None:
            self.display.say(
                f"the run ends after step {before} under a perturbation, which is undone: what is saved is "
                f"step {step}"
            )

    def _datasets(self) -> Datasets:
        config, train = self.config, self.config.train
        prefixes = [
            Path(each)
            for each in (*config.data.train_data_path, *config.data.data_path)
            if Path(each + ".idx").exists()
        ]
        beside = prefixes[0].parent if prefixes else Path(config.checkpoint.save or ".")
        # A weighted blend cannot be one pass over everything; any other evaluation is limited later.
        counted = config.data.mock_data or len(config.data.data_path) > 1
        # Samples of masked words are drawn to a number.
        counted = counted or config.model.masked_words
        validation = counted or len(config.data.valid_data_path) > 1 or train.eval_iters == 0
        return build_datasets(
            config.data,
            tokenizer=self.tokenizer,
            sequence_length=self.shape.seq_length,
            train_samples=int(self.batch_sizes.samples_after(self.train_iters)),
            valid_samples=train.eval_iters * self.global_batch_size if validation else None,
            test_samples=0,  # No run evaluates on it.
            seed=train.seed,
            cache_dir=beside / "index_cache",
            masked_words=config.model.masked_words,
            sentence_order=config.model.sentence_order,
        )

    def _resume(self) -> Progress:
        """Continue, or start from given weights, or start anew; say which."""
        resumed = self.store.resume()
        notes = list(resumed.notes)
        if resumed.folder is not None:
            # An older one may have taken the place of the one that was checked before the start.
            check_folder(resumed.folder, self.config)
            check_batch_size(resumed.folder, self.config, self.job.layout.world_size)
            check_document_end(resumed.folder, self.config, self.tokenizer.eod)
            check_origin(resumed.folder, self.config, continues=True)
        if resumed.folder is None and self.config.checkpoint.init_from_hf is not None:
            self.display.say(init_from_hf(self.config, self.trainable))
        if resumed.folder is not None and not has_order(
            self.datasets.train, read_manifest(resumed.folder).get("data_order")
        ):
            notes.append(
                "the order of training samples is not the checkpoint's (other data, or train_iters needs "
                "another number of epochs): some samples may come twice or not at all"
            )
        for line in (*(f"note: {note}" for note in notes), *resumed.lines):
            self.display.say(line)
        if notes and self.config.launch.strict:
            raise CheckpointError(
                f"{resumed.folder} cannot be continued exactly (--strict): {'; '.join(notes)}"
            )
        self.checkpoint, self.began_perturbed = resumed.folder, resumed.perturbed
        require_samples(
            len(self.datasets.train), resumed.progress, self.train_iters, self.batch_sizes, self.config.data
        )
        return resumed.progress

    def _announce(self) -> None:
        layout, backend = self.job.layout, self.job.backend
        parameters = count_parameters(model_shape(self.config)).trained
        self.output.start(
            self.progress.iteration,
            {
                "backend": backend.name,
                "device": backend.device_name(backend.current_device()),
                "layout": dataclasses.asdict(layout),
                "data_parallel_size": layout.dp,
                "global_batch_size": self.global_batch_size,
                "num_microbatches": self.shape.num_microbatches,
                "seq_length": self.shape.seq_length,
                "parameters": parameters,
                "precision": self.config.params_dtype,
                "pipeline_schedule": self.config.parallel.pipeline_schedule,
                "p2p_transport": self.config.parallel.p2p_transport,
                "p2p_carried": dict(transport.carried()),
                "flops_per_token": self.flops_per_token,
            },
            resumed_from=self.checkpoint,
        )
        self.display.say(
            f"{backend.name} ({backend.device_name(backend.current_device())}), "
            f"{layout_text(layout)}; {parameters:,} parameters in "
            f"{self.config.params_dtype}; {self.global_batch_size} x {self.shape.seq_length} tokens a step, "
            f"{self.train_iters} steps"
        )

    def _begin_policy(self) -> None:
        """Tell a pipeline schedule that adapts which step is next, and where its decisions go."""
        from mt_megatron.pipeline.execute.source import pipeline_schedule

        policy, metrics = pipeline_schedule(), self.output.metrics_path
        begin_at = getattr(policy, "begin_at", None)
        if begin_at is not None:
            folder = None if metrics is None else metrics.parent
            begin_at(self.progress.iteration, folder=folder, say=self.display.say)

    def _finished(self) -> bool:
        return self.progress.iteration >= self.train_iters

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.progress.iteration % interval == 0

    def _out_of_time(self) -> bool:
        # One clock decides; the wish travels to the others with the loss.
        limit = self.config.train.exit_duration_in_mins
        return limit is not None and self.job.is_main and time.monotonic() - self.started > 60 * limit

    def _report(self, window: Window, result: StepResult) -> None:
        values = {
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "consumed_samples": self.progress.consumed_samples,
            "consumed_tokens": self.progress.consumed_tokens,
            "skipped_iterations": self.progress.skipped_iterations,
            "loss_scale": float(self.trainable.optimizer.get_loss_scale()),
            **depth_values(window.results, sentence_order=self.config.model.sentence_order),
            **self.expert_loads.collect(),
            **self._mark(),
        }
        self.output.report(self.progress.iteration, window, values)

    def _mark(self) -> dict[str, str]:
        perturbed = self.scope.perturbed
        return {} if perturbed is None else {"perturbed": perturbed}

    def _evaluate(self) -> None:
        iters, dataset = self.config.train.eval_iters, self.datasets.valid
        if dataset is None or iters == 0:
            return
        began = time.monotonic()
        self.validation = evaluate(
            self.trainable,
            self.forward_step,
            dataset,
            self.shape,
            self.job,
            max_samples=iters * self.global_batch_size,
            advance=self._evaluating,
        )
        values = {
            "loss": self.validation.loss,
            "perplexity": perplexity(self.validation.loss),
            "tokens": self.validation.tokens,
            "seconds": time.monotonic() - began,
            **self._mark(),
        }
        self.scope_trainer.figures = (self.scope_trainer.figures[0], self.validation)
        self.metrics.record("valid", self.progress.iteration, values)
        self.scope.validated(
            self.progress.iteration, loss=self.validation.loss, tokens=self.validation.tokens
        )
        self.display.validation(self.validation.loss)
        self.display.say(
            f"step {self.progress.iteration}: validation loss {self.validation.loss:.4f} nats per token, "
            f"perplexity {values['perplexity']:.2f}, over {self.validation.tokens:,} tokens"
        )

    def _evaluating(self, done: int, total: int) -> None:
        if done % self.config.logging.log_interval == 0:
            how = f"{done} of {total} batches are evaluated" if done else f"{total} batches to evaluate"
            self.display.say(f"step {self.progress.iteration}: {how}")

    def _saved(self, reports: list[SaveReport]) -> None:
        """Tell what became of checkpoints; those that failed the store has told already."""
        for report in reports:
            values = {
                "path": None if report.folder is None else str(report.folder),
                "error": report.error,
                "bytes": report.size,
                "seconds": report.seconds,
                "stall_seconds": report.stall_seconds,
            }
            self.metrics.record("checkpoint", report.iteration, values)
            if report.folder is None:
                continue
            self.checkpoint = report.folder
            self.display.say(
                f"step {report.iteration}: checkpoint {report.folder} ({report.seconds:.1f} s, training held "
                f"up {report.stall_seconds:.2f} s)"
            )

    def _summary(self, loss: float | None) -> None:
        baselines = None
        # Tables of what follows a token say nothing about masked words.
        if self.job.is_main and self.validation is not None and not self.config.model.masked_words:
            baselines = corpus_baselines(
                self.config,
                self.datasets.valid,
                vocab_size=self.tokenizer.vocab_size,
                max_samples=self.config.train.eval_iters * self.global_batch_size,
            )
        seconds = time.monotonic() - self.started
        values = {
            "finished": self.progress.iteration >= self.train_iters,
            "train_loss": loss,
            "valid_loss": None if self.validation is None else self.validation.loss,
            "unigram": None if baselines is None else baselines.unigram,
            "bigram": None if baselines is None else baselines.bigram,
            "consumed_tokens": self.progress.consumed_tokens,
            "skipped_iterations": self.progress.skipped_iterations,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "seconds": seconds,
            **self._mark(),
        }
        lines = summary_lines(
            progress=self.progress,
            train_iters=self.train_iters,
            train_loss=loss,
            validation=self.validation,
            baselines=baselines,
            checkpoint=self.checkpoint,
            save=self.config.checkpoint.save,
            seconds=seconds,
        )
        self.output.end(self.progress.iteration, values, lines)


def _required(value: int | None, name: str) -> int:
    if value is None:
        raise DataError(f"{name} is not set; give --{name.replace('_', '-')}")
    return value
