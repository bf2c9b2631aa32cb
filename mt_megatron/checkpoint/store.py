"""The checkpoints of a run: where it continues from, when one is written, what is kept.

Saving is collective and agreed on: every rank calls ``save`` after the same step, says what it knows
in ``has_written`` before each step, and calls ``advance`` with what all agreed on after it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import mt_megatron
from mt_megatron.checkpoint import files
from mt_megatron.checkpoint.load import damage, load_checkpoint, load_weights
from mt_megatron.checkpoint.progress import Progress
from mt_megatron.checkpoint.retention import Retention, left_behind, recover, supersedes
from mt_megatron.checkpoint.run_lock import on_main
from mt_megatron.checkpoint.run_parts import Job, Trainable
from mt_megatron.checkpoint.save import Save, Saver, SaveReport
from mt_megatron.config.schema import CheckpointConfig
from mt_megatron.errors import DIVERGENCE_ADVICE, CheckpointError
from mt_megatron.patching.plan import installed_version


def versions(job: Job) -> dict[str, str | None]:
    """Versions of what took part, and the device it ran on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "megatron-core": installed_version("megatron-core"),
        "mt_megatron": mt_megatron.__version__,
        "backend": job.backend.name,
        "device": job.backend.device_name(job.backend.current_device()),
    }


DEFAULT_MINUTES = 30.0
"""Between two checkpoints of a run that has ``save`` and no interval: what an error costs at most."""

_SECONDS_TO_COMPLETE = 60.0
"""Time limit for rank 0 to publish the checkpoint of a run that ends by an error."""


class Agreed(Protocol):
    """The part of ``step.AgreedWishes`` that matters here."""

    @property
    def save_written(self) -> bool:
        """All ranks have written their part."""

    @property
    def save(self) -> bool:
        """A rank wants to save."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run starts."""

    progress: Progress

    folder: Path | None = None
    """The checkpoint that is continued; None when the run starts anew."""

    lines: tuple[str, ...] = ()
    """Lines for the log."""

    notes: tuple[str, ...] = ()
    """Parts of the run that do not continue exactly."""

    perturbed: str | None = None
    """Perturbations that its weights were saved under, as the manifest says; None: none."""


class CheckpointStore:
    """The checkpoints of one run; every method but ``has_written`` and ``close`` is collective."""

    def __init__(
        self,
        options: CheckpointConfig,
        trainable: Trainable,
        job: Job,
        manifest: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        alone: bool = True,
        touch: Callable[[], None] = lambda: None,
    ) -> None:
        """``manifest`` (JSON-able; ``config`` in it becomes ``config.yaml``) lies beside every checkpoint.
        ``say`` takes lines for the log. ``alone``: the run holds the lock of the folder to save to. ``touch``
        is called while the main thread waits for a write that gets on."""
        self.newest: Path | None = None
        """The newest complete checkpoint of this run, or the one it continues."""

        self.options = options
        self._trainable = trainable
        self._job = job
        self._say = say
        self._alone = alone
        self._pending: Save | None = None
        self._lost: SaveReport | None = None
        self._untold: list[SaveReport] = []
        self._retention = Retention(options, say) if options.save is not None and job.is_main else None
        self._saved_at = time.monotonic()
        self._left_behind: frozenset[int] = frozenset()
        self._saver: Saver | None = None
        if options.save is not None:
            document = {"versions": versions(job), **manifest}
            self._saver = Saver(Path(options.save), job, document, touch)

    def resume(self) -> Resumed:
        """Continue as ``--resume`` says, or start from given weights, or start anew.

        Raises ``CheckpointError`` on every rank when a checkpoint is damaged, missing or does not fit.
        The newest one being damaged ends the run as well, unless ``resume_skip_damaged`` is set: which
        steps are given up is not decided in silence.
        """
        options, verify = self.options, self.options.verify_checkpoint
        lines = _about_restarts(options)
        folder: Path | None = on_main(self._job, self._find)
        if folder is not None:
            if verify and options.resume == "auto":
                folder, skipped = self._skip_damaged(folder)
                lines += skipped
            progress, notes = load_checkpoint(
                folder, self._trainable, self._job, verify=verify and options.resume != "auto"
            )
            manifest = files.read_manifest(folder)
            if verify and "files" not in manifest:
                notes.append(f"{folder} was written without checksums: its files are taken as they are")
            self.newest = folder
            on_main(self._job, lambda: self._leave_behind(folder))
            self._superseding(folder)
            lines.append(f"continuing from {folder} at step {progress.iteration}")
            before, now = manifest.get("versions", {}), versions(self._job)
            changed = [
                f"{each} {before[each]} -> {now[each]}"
                for each in now
                if before.get(each, now[each]) != now[each]
            ]
            if changed:
                lines.append(f"versions that differ from those of {folder}: {', '.join(changed)}")
            return Resumed(
                progress=progress,
                folder=folder,
                lines=tuple(lines),
                notes=tuple(notes),
                perturbed=manifest.get("perturbed"),
            )
        if options.load is not None:
            start = on_main(self._job, lambda: files.resolve_checkpoint(Path(options.load or "")))
            load_weights(start, self._trainable, verify=verify)
            lines.append(f"starting from the weights of {start}")
            perturbed = files.read_manifest(start).get("perturbed")
            return Resumed(progress=Progress(), lines=tuple(lines), perturbed=perturbed)
        return Resumed(progress=Progress(), lines=tuple(lines))

    @property
    def run_name(self) -> str | None:
        """A name of this run that all ranks know and no other run has; None when it saves nothing."""
        return None if self._saver is None else self._saver.owner

    def wants_to_save(self) -> bool:
        """True where a checkpoint is due by the clock of rank 0; the other ranks follow it."""
        minutes = save_interval_in_mins(self.options)
        return minutes is not None and self._job.is_main and time.monotonic() - self._saved_at > 60 * minutes

    def note(self, name: str, value: str | None) -> None:
        """Have the manifests of later checkpoints say ``value`` under ``name``; None: nothing."""
        if self._saver is not None:
            others = {key: each for key, each in self._saver.manifest.items() if key != name}
            self._saver.manifest = others if value is None else {**others, name: value}

    def _leave_behind(self, folder: Path) -> None:
        """Name the steps of the branch that going back to ``folder`` leaves, in manifests from now on: this
        run's later steps come to lie among them."""
        if self._saver is None or folder.absolute().parent != self._saver.directory.absolute():
            return
        steps = {files.iteration_of(each) for each in files.complete_checkpoints(self._saver.directory)}
        later = {each for each in steps if each is not None and each > (files.iteration_of(folder) or 0)}
        self._left_behind = left_behind(folder) | later
        self._name_left_behind()

    def _name_left_behind(self) -> None:
        assert self._saver is not None
        others = {key: each for key, each in self._saver.manifest.items() if key != "left_behind"}
        named = {"left_behind": sorted(self._left_behind)} if self._left_behind else {}
        self._saver.manifest = {**others, **named}

    def put_off(self) -> None:
        """Skip the checkpoint that is due and restart the clock."""
        self._saved_at = time.monotonic()

    def is_due(self, progress: Progress, agreed: Agreed) -> bool:
        """Whether a checkpoint is due after the step that led to ``progress``, by steps or by the clock."""
        interval = self.options.save_interval
        return agreed.save or (interval is not None and progress.iteration % interval == 0)

    def save(self, progress: Progress, *, final: bool = False, read_back: bool = False) -> list[SaveReport]:
        """Write a checkpoint of ``progress``, in the background with ``async_save``; ``final`` waits.

        One that is still being written is waited for first. Returns what became of those that ended.
        A failure raises nothing: training goes on with the last good one (see ``raise_if_lost``).
        ``read_back``: no step will show that the last one is sound, so that it is compared with its
        checksums before what it supersedes goes.
        """
        if self._saver is None:
            return []
        self._saved_at = time.monotonic()
        reports = self._save(progress, final=final)
        if read_back:
            self._read_back()
        return reports

    def _save(self, progress: Progress, *, final: bool) -> list[SaveReport]:
        assert self._saver is not None
        ended = self._wait()
        if self.is_saved(progress):
            return ended
        background = self.options.async_save and not final
        if progress.iteration in self._left_behind:
            # It takes the other branch's place.
            self._left_behind -= {progress.iteration}
            self._name_left_behind()
        self._pending = Save(self._saver, self._trainable, progress, background=background)
        self._pending.begin()
        return ended if background else ended + self._wait()

    def is_saved(self, progress: Progress) -> bool:
        """Whether the newest complete checkpoint is the one of ``progress``, in the folder to save to."""
        if self.newest is None or self._saver is None:
            return False
        current = self._saver.directory / files.folder_name(progress.iteration)
        return self.newest.absolute() == current.absolute()

    def has_written(self) -> bool:
        """Whether this rank's part of the current phase of a save is done, well or not: all ranks hear of
        a failure when the phase ends."""
        return self._pending is not None and self._pending.ready

    def advance(self, agreed: Agreed, *, sound: bool) -> list[SaveReport]:
        """Take the next step of a save in the background when all ranks are ready for it. ``sound``: the
        step just made was applied, so that the newest complete checkpoint was trained from."""
        told, self._untold = self._untold, []
        if sound and self._retention is not None:
            self._retention.proven()
        if self._pending is None or not agreed.save_written:
            return told
        if self._pending.collected:
            return told + self._wait()
        self._pending.collect()
        return told

    def rollback(self) -> Progress:
        """Load the newest complete checkpoint of this run back into the live model and optimizer.

        Random states come back as well. Raises ``CheckpointError`` when there is none.
        """
        self._untold += self._wait()
        if self.newest is None:
            raise CheckpointError(
                "there is no complete checkpoint to go back to; set --save and a smaller --save-interval"
            )
        self._trainable.update_is_half_done = True
        progress, _ = load_checkpoint(
            self.newest, self._trainable, self._job, verify=self.options.verify_checkpoint
        )
        self._trainable.update_is_half_done = False
        return progress

    def raise_if_lost(self) -> None:
        """Raise ``CheckpointError`` when the last checkpoint that was asked for could not be written."""
        if self._lost is not None:
            kept, then = f"the newest complete one is {self.newest}", "continues from there"
            if self.newest is None:
                kept, then = "no other is complete", "begins with its first step"
            advice = DIVERGENCE_ADVICE if self._lost.not_finite else "Free space or mend the folder"
            raise CheckpointError(
                f"the checkpoint of step {self._lost.iteration} is lost: {self._lost.error}; {kept}. "
                f"{advice}, then start again: the run {then}"
            )

    def close(self) -> None:
        """End what is under way; call when the run is over, for whatever reason. Not collective: a save that
        all ranks have written is completed, any other is given up, and ``say`` hears of both."""
        save, self._pending = self._pending, None
        if save is not None:
            report = save.finish_alone(_SECONDS_TO_COMPLETE)
            if report is not None and report.folder is not None:
                self._say(f"step {save.iteration}: the checkpoint that was being written is complete")
                self._say_all(report)
            else:
                why = "not every rank is there to complete it" if report is None else report.error
                self._say(f"step {save.iteration}: the checkpoint that was being written is given up: {why}")
        if self._retention is not None:
            self._retention.close()

    def _wait(self) -> list[SaveReport]:
        save, self._pending = self._pending, None
        if save is None:
            return []
        if not save.collected:
            save.collect()
        report = save.finish()
        if report.folder is None:
            self._lost = report
            kept = "no checkpoint is complete yet" if self.newest is None else f"{self.newest} is kept"
            self._say(
                f"step {report.iteration}: the checkpoint could NOT be written: {report.error}; training "
                f"goes on, {kept}"
            )
        else:
            self._lost, self.newest = None, report.folder
            self._superseding(report.folder)
            self._say_all(report)
        return [report]

    def _say_all(self, report: SaveReport) -> None:
        for line in report.lines:
            self._say(f"note: {line}")

    def _superseding(self, folder: Path) -> None:
        if self._retention is not None:
            self._retention.superseding(folder)

    def _read_back(self) -> None:
        if self.newest is None or not supersedes(self.options) or self._lost is not None:
            return
        found = damage(self.newest)
        if found:
            self._lost = SaveReport(
                iteration=files.iteration_of(self.newest) or 0,
                error="it is not what was written when it is read again: " + "; ".join(found),
            )
            self._say(f"{self.newest} is DAMAGED: {'; '.join(found)}; older checkpoints are kept")
        elif self._retention is not None:
            self._retention.proven()

    def _find(self) -> Path | None:
        options = self.options
        if options.save is not None:
            recover(Path(options.save), alone=self._alone, say=self._say)
        if options.resume not in ("auto", "never"):
            return files.resolve_checkpoint(Path(options.resume))
        if options.resume == "auto" and options.save is not None:
            return files.latest_named(Path(options.save))
        return None

    def _skip_damaged(self, newest: Path) -> tuple[Path, list[str]]:
        """``newest`` when it is whole; else the newest one before it that is, or an error."""
        found = damage(newest)
        if not found:
            return newest, []
        said = f"{newest} is damaged:\n" + "\n".join(f"- {line}" for line in found)
        others: frozenset[int] = on_main(self._job, lambda: left_behind(newest))
        there: list[Path] = on_main(self._job, lambda: files.complete_checkpoints(newest.parent))
        older = [
            each
            for each in there
            if (files.iteration_of(each) or 0) < (files.iteration_of(newest) or 0)
            and files.iteration_of(each) not in others
        ]
        good = next((each for each in reversed(older) if not damage(each)), None)
        if good is None:
            raise CheckpointError(f"{said}\nNo older checkpoint is whole. Start anew with another --save")
        if not self.options.resume_skip_damaged:
            raise CheckpointError(
                f"{said}\nThe newest whole one is {good}: continue from it with --resume-skip-damaged or "
                f"--resume {good}"
            )
        return good, [f"DAMAGED: {said}\ncontinuing from {good} instead (--resume-skip-damaged)"]


def save_interval_in_mins(options: CheckpointConfig) -> float | None:
    """After how many minutes a checkpoint is due; None: the clock does not decide."""
    if options.save_interval_in_mins is not None:
        return options.save_interval_in_mins or None
    return DEFAULT_MINUTES if options.save is not None and options.save_interval is None else None


def _about_restarts(options: CheckpointConfig) -> list[str]:
    if options.resume == "auto" or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return []
    return [
        f"note: torchrun may start this run again, and --resume {options.resume} then holds as well: only "
        "--resume auto continues where it was"
    ]
