"""Everything a run says, put together: display, records, speed, communication, and the picture at its end."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.backends.telemetry.readings import Unsupported
from mt_megatron.checkpoint.progress import Progress
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.seams import events
from mt_megatron.training.distributed import Job
from mt_megatron.training.logging.display import Display
from mt_megatron.training.logging.metrics import Metrics, Records, Sink, metrics_path, run_name
from mt_megatron.training.logging.picture import write_picture
from mt_megatron.training.logging.tensorboard import TensorBoard
from mt_megatron.training.logging.throughput import Peak, Window, peak_of
from mt_megatron.training.logging.wandb import WeightsAndBiases
from mt_megatron.training.step import StepResult

_COUNTED: frozenset[events.EventName] = frozenset({"collective", "p2p"})


class CommunicationClock:
    """Seconds within ``collective`` and ``p2p`` events of ``mt_megatron.seams.events``.

    Time within nested events counts once. For an operation that was only started it is the time to
    start it and the time of the wait that ends it, not what ran in the background meanwhile. Waiting
    for a slower process counts as communication. Host time: on a device that queues its
    collectives the host is elsewhere by the time they run, so there it says nothing.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._local = threading.local()
        self._threads: list[_Thread] = []
        self._stop = events.subscribe(self._hear, _COUNTED)

    def seconds(self) -> float:
        """Seconds so far, over all threads; one that is still inside an event counts when it leaves."""
        return sum(thread.seconds for thread in self._threads)

    def close(self) -> None:
        """Listen no longer."""
        self._stop()

    def _hear(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        thread: _Thread | None = getattr(self._local, "thread", None)
        if thread is None:
            thread = self._local.thread = _Thread()
            self._threads.append(thread)
        if phase == "begin":
            if thread.depth == 0:
                thread.began = self._now()
            thread.depth += 1
        elif thread.depth:
            # An end without its begin is of an event that was open when listening started.
            thread.depth -= 1
            if thread.depth == 0:
                thread.seconds += self._now() - thread.began


class _Thread:
    """What one thread has spent; nobody else writes to it."""

    __slots__ = ("began", "depth", "seconds")

    def __init__(self) -> None:
        self.began = 0.0
        self.depth = 0
        self.seconds = 0.0


SILENCE_SECONDS = 30.0


class Pace:
    """Knows when something was last said."""

    def __init__(self, log_interval: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._log_interval = log_interval
        self._now = now
        self._steps = 0
        self._last = now()

    def due(self, iteration: int) -> bool:
        """Whether a line is due after ``iteration``, one more step of this process; a report of its own
        says it where ``log_interval`` divides it.

        Steps 1, 2, 5, 10, 20, 50 ... before the first report, and any after ``SILENCE_SECONDS``.
        """
        self._steps += 1
        if iteration % self._log_interval == 0:
            return False
        early = self._steps < self._log_interval and str(self._steps).rstrip("0") in ("1", "2", "5")
        return early or self._now() - self._last >= SILENCE_SECONDS

    def told(self) -> None:
        """A line was shown."""
        self._last = self._now()


class Output:
    """What one rank says; all but rank 0 are silent. Collective: every rank must make one."""

    def __init__(self, config: TrainingConfig, job: Job, *, train_iters: int, flops_per_token: float) -> None:
        """Open every place that keeps records.

        Raises ``ConfigError`` on every rank when rank 0 cannot write to one of them.
        """
        self._config = config
        self._job = job
        self._train_iters = train_iters
        self._flops_per_token = flops_per_token
        self._began = time.monotonic()
        self.run_id = uuid.uuid4().hex[:12]
        """Tells the records of one process from those of the run it continues."""
        self.peak: Peak = peak_of(config, job.backend)
        self.wandb: WeightsAndBiases | None = None
        self._metrics: Metrics | None = None
        failure: ConfigError | None = None
        sinks: list[Sink] = []
        try:
            if job.is_main:
                sinks = self._open()
        except ConfigError as error:
            failure = error
        said = job.agree(failure)
        if said is not None:
            raise failure or ConfigError(said.partition(": ")[2])
        self.display = Display(
            train_iters,
            enabled=job.is_main,
            mode=config.logging.display,
            title=_title(config),
            subtitle=_subtitle(job, config),
        )
        self.records = Records(sinks, self.display.say)
        if self._metrics is not None and self._metrics.unlocked:
            self.display.say(f"metrics: no lock keeps a second run out ({self._metrics.unlocked})")
        self._pace = Pace(config.logging.log_interval)
        self._clock: CommunicationClock | None = None
        self._told = False
        self._shown: int | None = None
        self._drawn = False

    @property
    def metrics_path(self) -> Path | None:
        """The JSONL file of the run; None when it keeps none."""
        return metrics_path(self._config)

    @property
    def picture_path(self) -> Path | None:
        """The loss curve beside the metrics; drawn when the run ends, however it does."""
        return None if self.metrics_path is None else self.metrics_path.with_suffix(".svg")

    def start(self, iteration: int, values: Mapping[str, Any], *, resumed_from: Path | None) -> None:
        """The run begins, or goes on, after ``iteration``. ``close`` has to be called from here on."""
        # A device queues its collectives: the host's time in them would be taken for theirs.
        measurable = self._job.backend.device_type == "cpu" and self._job.layout.world_size > 1
        if self._job.is_main and measurable:
            self._clock = CommunicationClock()
        self.display.open()
        facts = {
            "run_id": self.run_id,
            "resumed_from": None if resumed_from is None else str(resumed_from),
            "train_iters": self._train_iters,
            "world_size": self._job.layout.world_size,
            "peak_flops": self.peak.flops,
            "peak_source": self.peak.source,
        }
        self.records.record("start", iteration, {**values, **facts})
        self.display.tick(iteration)
        # No CPU is in the tables: there the line would be about nothing that went wrong.
        if self.peak.flops is None and self._job.backend.device_type != "cpu":
            device = self._job.backend.device_name(self._job.backend.current_device())
            self.display.say(
                f"MFU: unknown peak of {device} in {self._config.params_dtype}, give --peak-tflops"
            )
        if self._job.is_main and self.metrics_path is None:
            self.display.say("no metrics are kept: give --save or --metrics-path")
        if self.wandb is not None:
            self.display.say(f"wandb: {self.wandb.folder} ({self.wandb.reason})")

    def window(self) -> Window:
        """A new stretch of steps to average over."""
        if self._job.layout.world_size == 1:
            return Window(communication=lambda: 0.0)
        return Window(communication=None if self._clock is None else self._clock.seconds)

    def report(self, iteration: int, window: Window, values: Mapping[str, Any]) -> None:
        """The steps of ``window``, the last of which was ``iteration``, to every place."""
        if not self._job.is_main:
            return
        found = self._state(iteration, window, values)
        self.records.record("train", iteration, found)
        if iteration != self._shown:
            self.display.step(iteration, found)
        self._pace.told()

    def between(self, progress: Progress, window: Window, result: StepResult) -> None:
        """After a step that no report follows: a line where one is due (``Pace``), and no record."""
        if self._job.is_main and self._pace.due(progress.iteration):
            skipped = progress.skipped_iterations
            values = {"grad_norm": result.grad_norm, "lr": result.lr, "skipped_iterations": skipped}
            self.display.step(progress.iteration, self._state(progress.iteration, window, values))
            self._shown = progress.iteration
            self._pace.told()

    def _state(self, iteration: int, window: Window, values: Mapping[str, Any]) -> dict[str, Any]:
        speed = window.speed(
            flops_per_token=self._flops_per_token,
            world_size=self._job.layout.world_size,
            peak=self.peak,
        )
        return {
            **values,
            "loss": window.loss(),
            **dataclasses.asdict(speed),
            "elapsed_seconds": time.monotonic() - self._began,
            "eta_seconds": (self._train_iters - iteration) * speed.step_seconds,
            **device_state(self._job.backend),
        }

    def end(self, iteration: int, values: Mapping[str, Any], lines: Sequence[str]) -> None:
        """The run ends as it should: its last record, the picture, and ``lines`` about it all."""
        self.records.record("end", iteration, values)
        self._draw()
        self._told = True
        self.display.close()
        for line in [*lines, *self._places()]:
            self.display.say(line)

    def close(self) -> None:
        """Finish every record and leave the display's last state standing; a run that was interrupted
        gets its picture here."""
        if self._clock is not None:
            self._clock.close()
        self.records.close()
        if not self._told:
            self._draw()
        self.display.close()
        if not self._told:
            for line in self._places():
                self.display.say(line)
        self._told = True

    def _places(self) -> list[str]:
        found = []
        if self.metrics_path is not None:
            found.append(f"metrics: {self.metrics_path}")
        if self._config.logging.tensorboard_dir is not None:
            found.append(f"TensorBoard: {self._config.logging.tensorboard_dir}")
        if self.wandb is not None:
            found.append(f"wandb: {self.wandb.folder}")
        if self._drawn:
            found.append(f"picture: {self.picture_path}")
        return found

    def _open(self) -> list[Sink]:
        config, path = self._config, self.metrics_path
        sinks: list[Sink] = []
        if path is not None:
            self._metrics = Metrics(path)
            sinks.append(self._metrics)
        if config.logging.tensorboard_dir is not None:
            sinks.append(
                TensorBoard(Path(config.logging.tensorboard_dir), config_yaml=config.to_show().to_yaml())
            )
        if config.logging.wandb_project is not None:
            self.wandb = WeightsAndBiases(config)
            sinks.append(self.wandb)
        return sinks

    def _draw(self) -> None:
        path, picture = self.metrics_path, self.picture_path
        if not self._job.is_main or path is None or picture is None:
            return
        try:
            write_picture(path, picture, _title(self._config))
            self._drawn = True
        except ValueError:
            # No step was reported: there is nothing to see.
            return
        except OSError as error:
            self.display.say(f"WARNING: the picture {picture} could not be written: {error}")


def device_state(backend: Backend) -> dict[str, Any]:
    """Utilisation in percent and memory in bytes, None where the device does not tell."""
    reading = backend.telemetry(backend.current_device())
    utilization = reading.utilization
    return {
        "utilization": None if isinstance(utilization, Unsupported) else float(utilization),
        "memory_bytes": backend.max_memory_allocated(),
        "device_memory_used": None if isinstance(reading.memory_used, Unsupported) else reading.memory_used,
        "device_memory_total": backend.total_memory(),
    }


def _title(config: TrainingConfig) -> str:
    names = ["mt_megatron", config.model.preset or config.model.family, run_name(config)]
    return " · ".join(dict.fromkeys(name for name in names if name))


def _subtitle(job: Job, config: TrainingConfig) -> str:
    layout = job.layout
    sizes = [("tensor", layout.tp), ("pipeline", layout.pp), ("context", layout.cp), ("data", layout.dp)]
    shown = ", ".join(f"{name} {size}" for name, size in sizes if size > 1)
    processes = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    return " · ".join(part for part in (job.backend.name, processes, shown, config.params_dtype) if part)
