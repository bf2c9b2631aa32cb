"""Sections ``scan`` and ``scope``: traces of what ranks do, recordings of what happens inside the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """Tracing and diagnosis (``mt_megatron.scan``). ``--scan off`` leaves nothing of it behind."""

    scan: Literal["off", "base", "full", "kernel"] = "base"
    """How much every rank records. base: steps, micro-batches, collectives, transfers, data, optimizer,
    checkpoints and host facts; full: also layers and their parts; kernel: also every kernel."""

    scan_window: str | None = None
    """A higher level for some steps: ``EVERY:STEPS:LEVEL``, such as ``1000:2:kernel``. None: none."""

    scan_dir: str | None = None
    """Folder of the run under which the trace is written, in ``scan``. None: that of the metrics."""

    scan_alerts: bool = True
    """Whether a process beside rank 0 watches the traces of all ranks while they grow, and says who holds
    the run up."""

    scan_webhook: str | None = None
    """URL that alerts are also posted to, as JSON. None: none."""

    scan_prometheus_port: int | None = None
    """Port at which Prometheus may read figures, on loopback; 0: any free one. None: none."""

    scan_prometheus_address: str | None = None
    """Address of rank 0's machine at which it listens instead, such as ``10.0.3.4``; ``0.0.0.0``: all of
    them. Who reaches it can read the figures. None: loopback."""

    scan_prometheus_hosts: tuple[str, ...] = ()
    """Names by which Prometheus asks, besides loopback's, the address and the machine's own. Requests for any
    other host are refused."""

    scan_group_readable: bool = False
    """Whether the group of the trace's folder may read the trace and what is made of it (folders 0750, files
    0640). False: the owner alone (0700, 0600)."""

    scan_retain_mib: int = 1024
    """Size of a rank's trace in MiB; beyond it the oldest files go first."""

    scan_on_straggler: Literal["continue", "checkpoint-and-exit"] = "continue"
    """What follows when a slow rank was found and a measurement confirmed it. checkpoint-and-exit: save, end
    with code 79, and list its host for ``mt-megatron launch --exclude-hosts``."""


@dataclass(frozen=True, kw_only=True)
class ScopeConfig:
    """Recordings from inside the model (``mt_megatron.scope``). ``--scope off`` leaves nothing of it."""

    scope: Literal["off", "record", "live"] = "live"
    """record: statistics of layers, and what is asked for, are recorded beside the metrics, in ``scope``.
    live: a page on loopback shows them while they come."""

    scope_interval: int = 20
    """Steps from one recording of the statistics to the next."""

    scope_watch: tuple[str, ...] = ()
    """Further tensors and statistics, as ``KIND@MODULE`` such as
    ``attention@decoder.layers.0:heads=0,2:tokens=0-255:every=100``."""

    scope_port: int = 0
    """Port of the live page, on loopback of rank 0's machine; 0: any free one."""

    scope_sink: tuple[str, ...] = ()
    """Where the recorded numbers also go, from the sidecar of rank 0's node: ``tensorboard[:FOLDER]``,
    ``wandb[:PROJECT]`` or ``trackio[:PROJECT]``."""

    scope_lab: str | None = None
    """YAML file of perturbations that are armed at the start. None: none."""

    scope_retain_mib: int = 512
    """Size of a node's recording in MiB; beyond it the oldest tensors go first."""

    scope_dir: str | None = None
    """Folder of the run under which the recording is written, in ``scope``. None: that of the metrics."""

    scope_pause_minutes: float = 30.0
    """Minutes after which a pause that no controller holds ends by itself."""
