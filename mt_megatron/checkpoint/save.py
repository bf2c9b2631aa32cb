"""One checkpoint from the live tensors to its published folder, in three steps that all ranks take.

``begin`` takes the content, and every rank writes its own files; ``collect`` hears from all ranks
and lets rank 0 complete and name the folder; ``finish`` tells all ranks what became of it. Between
them training may go on: what must not change is a copy by then.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from mt_megatron.checkpoint import files
from mt_megatron.checkpoint.load import padded_vocab_size, run_state
from mt_megatron.checkpoint.plan import Plan, Planner, write_metadata, write_results
from mt_megatron.checkpoint.progress import Progress
from mt_megatron.checkpoint.rng import capture_rng, rng_file_name
from mt_megatron.checkpoint.run_parts import Job, Trainable, synchronised_parameters
from mt_megatron.checkpoint.write import Snapshot, Task, Written, saved, tensor_file, write_files
from mt_megatron.errors import CheckpointError
from mt_megatron.fp8 import checkpoint as fp8
from mt_megatron.seams import collectives, events

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What became of one checkpoint, the same on every rank but for the stall."""

    iteration: int

    folder: Path | None = None
    """The complete checkpoint; None when it could not be written."""

    error: str | None = None
    """Why not, naming rank, file and reason."""

    not_finite: bool = False
    """Whether that is a weight or an optimizer's state that is not finite."""

    size: int = 0
    """Bytes of all files."""

    seconds: float = 0.0
    """From its beginning until it was complete, on rank 0."""

    stall_seconds: float = 0.0
    """How long it kept this rank from training."""

    lines: tuple[str, ...] = ()
    """Lines for the log: what stays on the disk and is not needed."""


class Saver:
    """What the saves of one run share: the plan, the host memory, the name of their partial folders."""

    def __init__(
        self,
        directory: Path,
        job: Job,
        manifest: Mapping[str, Any],
        touch: Callable[[], None] = lambda: None,
    ) -> None:
        """Collective. ``touch`` is called while the main thread waits for a write that gets on."""
        name = [files.owner_name()]
        with collectives.announced("broadcast_object", "world", None):
            dist.broadcast_object_list(name, src=0)
        self.directory = directory
        self.job = job
        self.manifest = manifest
        self.touch = touch
        self.owner: str = name[0]
        self.planner = Planner(job)
        self.snapshot = Snapshot(job.backend)
        self.sent: list[Any] | None = None
        self.results: list[list[Any]] = [[] for _ in range(job.layout.world_size)]


class Save:
    """One checkpoint. ``begin``, ``collect`` and ``finish`` are collective, in this order."""

    def __init__(self, saver: Saver, trainable: Trainable, progress: Progress, *, background: bool) -> None:
        self.iteration = progress.iteration
        self._saver = saver
        self._manifest = saver.manifest
        """As it is now: it may say other things when this is written."""

        self._trainable = trainable
        self._progress = progress
        self._background = background
        self._is_awaited = not background
        self._final = saver.directory / files.folder_name(progress.iteration)
        self._partial = saver.directory / f".{self._final.name}.{saver.owner}.partial"
        self._plan: Plan | None = None
        self._results: list[Any] = []
        self._writing: Task | Written | None = None
        self._publishing: Task | SaveReport | None = None
        self._began = time.monotonic()
        self.stall_seconds = 0.0

    def begin(self) -> None:
        """Take the content and start to write it; in the background, or until it is written."""
        job, saver, started = self._saver.job, self._saver, time.monotonic()
        with events.span("checkpoint", iteration=self.iteration), synchronised_parameters(self._trainable):
            state = run_state(self._trainable, self._progress, is_loading=False)
            plan, content = saver.planner.content(state)
            self._plan, self._results = plan, write_results(plan, content)
            common = [saved(content.common)] if job.is_main else []
            rng = [saved(capture_rng(job) | fp8.rank_state(self._trainable.chunks))]
            tensors, objects = content.tensors, content.objects
            if self._background:
                tensors = saver.snapshot.take(tensors)
            parts: list[Any] = [(rng_file_name(job.rank), lambda: rng)]
            if job.is_main:
                parts.append(("common.pt", lambda: common))
            if tensors or objects:
                names = [name for name, _ in plan.tensor_keys]
                parts.append((plan.file_name, lambda: tensor_file(tensors, names, objects)))
            if self._background:
                self._writing = Task(lambda: self._write(parts), "checkpoint-write")
            else:
                self._writing = self._write(parts)
        self.stall_seconds += time.monotonic() - started

    def _write(self, parts: list[Any]) -> Written:
        events.begin("checkpoint", op="write", iteration=self.iteration)
        written = write_files(self._partial, parts, self._saver.job.rank, self._wrote)
        events.end("checkpoint", bytes=sum(entry["bytes"] for entry in written.files.values()))
        return written

    def _wrote(self) -> None:
        if self._is_awaited:
            self._saver.touch()

    @property
    def ready(self) -> bool:
        """Whether this rank's part of the current step is done, so that the next would not wait for it."""
        current = self._publishing if self.collected else self._writing
        return current.done if isinstance(current, Task) else True

    @property
    def collected(self) -> bool:
        """Whether ``collect`` has been called."""
        return self._plan is None

    def collect(self) -> None:
        """Hear what every rank wrote; rank 0 then publishes it, or removes it when one failed."""
        with events.span("checkpoint", op="collect", iteration=self.iteration):
            self._collect()

    def _collect(self) -> None:
        started = time.monotonic()
        saver, job, plan = self._saver, self._saver.job, self._plan
        assert plan is not None
        self._is_awaited = True
        written = self._writing.result() if isinstance(self._writing, Task) else self._writing
        # Where things are in the files changes as rarely as the plan.
        news = None if self._results == saver.sent else self._results
        saver.sent = self._results
        heard: list[Any] | None = [None] * job.layout.world_size if job.is_main else None
        with collectives.announced("gather_object", "world", None):
            dist.gather_object((written, news), heard, dst=0)
        self._plan = self._writing = None
        if heard is not None:
            for rank, (_, results) in enumerate(heard):
                if results is not None:
                    saver.results[rank] = results
            parts = [each for each, _ in heard]
            everyone = list(saver.results)
            if self._background:
                self._publishing = Task(lambda: self._publish(plan, parts, everyone), "checkpoint-publish")
            else:
                self._publishing = self._publish(plan, parts, everyone)
        self.stall_seconds += time.monotonic() - started

    def finish(self) -> SaveReport:
        """Wait until rank 0 is done and learn the outcome."""
        started = time.monotonic()
        with events.span("checkpoint", op="finish", iteration=self.iteration):
            done = self._publishing.result() if isinstance(self._publishing, Task) else self._publishing
            said = [done]
            with collectives.announced("broadcast_object", "world", None):
                dist.broadcast_object_list(said, src=0)
        report = said[0]
        assert report is not None
        self.stall_seconds += time.monotonic() - started
        return replace(report, stall_seconds=self.stall_seconds)

    def finish_alone(self, seconds: float) -> SaveReport | None:
        """The outcome of a checkpoint that all ranks have written, without another word to them, for a run
        that ends by an error; None when it is not known within ``seconds``."""
        if not self.collected:
            return None
        if self._publishing is not None:
            done = self._publishing.result() if isinstance(self._publishing, Task) else self._publishing
            return done if isinstance(done, SaveReport) else None
        # Rank 0 publishes it, and whoever ends first takes it along.
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if files.pointed_at(self._final):
                return SaveReport(iteration=self.iteration, folder=self._final)
            time.sleep(0.05)
        return None

    def _publish(self, plan: Plan, parts: list[Written], results: list[list[Any]]) -> SaveReport:
        failed = [part.error for part in parts if part.error is not None]
        if failed:
            shutil.rmtree(self._partial, ignore_errors=True)
            return SaveReport(
                iteration=self.iteration,
                error="; ".join(failed),
                not_finite=any(part.not_finite for part in parts),
            )
        try:
            files.reached("written")
            listed = {name: entry for part in parts for name, entry in part.files.items()}
            self._see(listed, parts)
            write_metadata(self._partial, plan.metadata, results)
            own = [".metadata", "metadata.json"]
            if "config" in self._manifest:
                text = yaml.safe_dump(self._manifest["config"], sort_keys=False)
                files.write_durably(self._partial / CONFIG_FILE, text)
                own.append(CONFIG_FILE)
            listed |= {name: files.checksum(self._partial / name) for name in own}
            files.write_manifest(self._partial, self._document(listed))
            lines = files.publish(self._partial, self._final, self._saver.owner)
        except Exception as error:  # noqa: BLE001 (the other ranks wait to hear of it, whatever it is)
            shutil.rmtree(self._partial, ignore_errors=True)
            reason = str(error) if isinstance(error, OSError) else repr(error)
            return SaveReport(
                iteration=self.iteration, error=f"rank 0 cannot complete {self._final}: {reason}"
            )
        files.reached("done")
        return SaveReport(
            iteration=self.iteration,
            folder=self._final,
            size=sum(entry["bytes"] for entry in listed.values()),
            seconds=time.monotonic() - self._began,
            lines=tuple(lines),
        )

    def _see(self, listed: Mapping[str, Any], parts: list[Written]) -> None:
        for part in parts:
            for name in part.files:
                path = self._partial / name
                if not path.exists() or path.stat().st_size != listed[name]["bytes"]:
                    raise OSError(
                        f"rank {part.rank} wrote {path}, which rank 0 does not find whole: --save must be "
                        "one folder that all nodes see"
                    )

    def _document(self, listed: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "format": 2,
            "progress": asdict(self._progress),
            "layout": asdict(self._saver.job.layout),
            "padded_vocab_size": padded_vocab_size(self._trainable),
            "files": dict(listed),
            **self._manifest,
        }


def save_checkpoint(
    directory: Path, trainable: Trainable, progress: Progress, job: Job, *, manifest: Mapping[str, Any]
) -> Path:
    """Write one complete checkpoint below ``directory`` and point ``LATEST`` at it; collective.

    ``manifest`` (JSON-able) is stored beside the weights. An older checkpoint of the same iteration
    is replaced. Returns the checkpoint's folder; raises ``CheckpointError`` on every rank when any
    could not write its part.
    """
    save = Save(Saver(directory, job, manifest), trainable, progress, background=False)
    save.begin()
    save.collect()
    report = save.finish()
    if report.folder is None:
        raise CheckpointError(f"{report.error}. Check free space and permissions")
    return report.folder
