"""A program's part of tracing: where the trace of a run goes, and what a step does for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_megatron.training.run_folder import agreed_folder, run_folder

if TYPE_CHECKING:
    from mt_megatron.config.schema import TrainingConfig
    from mt_megatron.scan.session import Session
    from mt_megatron.training.distributed import Job


class Tracing:
    """What ``--scan`` asks for; with ``off``, and where no folder is known, it does nothing at all."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session

    def start(self) -> None:
        """Begin; collective."""
        if self._session is not None:
            self._session.start()

    @property
    def folder(self) -> Path | None:
        """Where the trace lies; None when none is written."""
        if self._session is None or self._session.recorder is None:
            return None
        return self._session.files.root

    @property
    def wants_measurement(self) -> bool:
        """Whether this rank wants a measurement after the next step."""
        return self._session is not None and self._session.wants_measurement

    @property
    def wants_to_leave(self) -> bool:
        """Whether this rank wants to end the run because of a confirmed straggler."""
        return self._session is not None and self._session.wants_to_leave

    def measure(self) -> None:
        """Measure; collective, once all ranks have agreed to."""
        if self._session is not None:
            self._session.measure()

    def close(self) -> None:
        """End it; no collective."""
        if self._session is not None:
            self._session.close()


def tracing_of(
    config: TrainingConfig,
    job: Job,
    *,
    metrics: Path | None,
    modules: Sequence[Any],
    num_microbatches: int,
    say: Callable[[str], None],
) -> Tracing:
    """The tracing that ``config`` asks for; nothing is started yet. Collective. ``metrics``: the run's JSONL
    file."""
    if config.scan.scan == "off":
        return Tracing()
    folder = agreed_folder(run_folder(config.scan.scan_dir, metrics), job.layout.world_size)
    if folder is None:
        say("no trace is kept: give --save or --scan-dir (or --scan off)")
        return Tracing()
    # Not earlier: a run that is not traced need not load any of it.
    from mt_megatron.data.loader.queue_depth import micro_batches_ready
    from mt_megatron.scan.monitor.watcher_process import Alerting
    from mt_megatron.scan.record.levels import Window
    from mt_megatron.scan.session import Session

    scan, model = config.scan, config.model
    alerting = Alerting(
        webhook=scan.scan_webhook,
        prometheus_port=scan.scan_prometheus_port,
        prometheus_address=scan.scan_prometheus_address,
        prometheus_hosts=scan.scan_prometheus_hosts,
    )
    return Tracing(
        Session(
            folder,
            rank=job.rank,
            layout=job.layout,
            backend=job.backend,
            level=scan.scan,
            window=None if scan.scan_window is None else Window.parse(scan.scan_window),
            alerting=alerting if scan.scan_alerts else None,
            on_straggler=scan.scan_on_straggler,
            group_readable=scan.scan_group_readable,
            retain_mib=scan.scan_retain_mib,
            facts={
                "num_microbatches": num_microbatches,
                "model": {
                    "name": model.preset or model.family,
                    "num_layers": model.num_layers,
                    "hidden_size": model.hidden_size,
                    "num_experts": model.num_moe_experts,
                },
                "seq_length": config.train.seq_length,
                "micro_batch_size": config.train.micro_batch_size,
                "params_dtype": config.params_dtype,
            },
            modules=modules,
            samples={"data_queue_depth": micro_batches_ready},
            say=say,
        )
    )
