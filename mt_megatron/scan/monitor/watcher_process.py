"""The process beside rank 0 that reads all ranks' traces while they grow and says who holds the run up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mt_megatron.backends.threads import RankThread

from .child_process import end_child, relay_lines, start_child

logger = logging.getLogger("mt_megatron")

START_AFTER_SECONDS = 10.0
"""A run that ends before is not worth a second process."""

WEBHOOK_VARIABLE = "MT_MEGATRON_SCAN_WEBHOOK"
"""Holds the webhook's address for the watcher: it may be a secret, and everybody reads command lines."""

_SECONDS_TO_END = 3.0


@dataclass(frozen=True, kw_only=True)
class Alerting:
    """To whom the watcher speaks, besides the run's log and ``alerts.jsonl``."""

    webhook: str | None = None
    prometheus_port: int | None = None
    prometheus_address: str | None = None
    """None: loopback."""

    prometheus_hosts: tuple[str, ...] = ()
    """Names besides the machine's own by which Prometheus asks for it."""

    def arguments(self) -> list[str]:
        """As the watcher's command line has them."""
        if self.prometheus_port is None:
            return []
        # In one word each: an address or a name may begin with a dash only by mistake, and is then refused.
        found = ["--prometheus-port", str(self.prometheus_port)]
        if self.prometheus_address is not None:
            found.append(f"--prometheus-address={self.prometheus_address}")
        return found + [f"--prometheus-host={host}" for host in self.prometheus_hosts]

    def variables(self) -> dict[str, str]:
        """What its environment has besides."""
        return {} if self.webhook is None else {WEBHOOK_VARIABLE: self.webhook}


class WatcherProcess:
    """Starts it a few seconds after ``start`` and ends it with ``close``; it ends by itself when this
    process is gone. That it cannot start, or has ended, is said once; training goes on."""

    def __init__(
        self,
        scan_folder: Path,
        alerting: Alerting,
        *,
        say: Callable[[str], None] = logger.warning,
        start_after: float = START_AFTER_SECONDS,
    ) -> None:
        """``say`` gets the lines that it writes, from a thread."""
        self._say = say
        self._command = [
            *(sys.executable, "-m", "mt_megatron.scan.monitor.watch", str(scan_folder)),
            *("--parent-pid", str(os.getpid()), *alerting.arguments()),
        ]
        self._variables = alerting.variables()
        self._start_after = start_after
        self._closed = threading.Event()
        self._stir = threading.Event()
        self._thread = RankThread(target=self._run, name="scan-watcher", daemon=True)
        self.process: subprocess.Popen[bytes] | None = None
        """Once it runs."""

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    def close(self) -> None:
        """End it, with what it still had to say, within a few seconds."""
        self._closed.set()
        self._stir.set()
        if self._thread.is_alive():
            self._thread.join(2 * _SECONDS_TO_END)

    def _run(self) -> None:
        if self._closed.wait(self._start_after):
            return
        try:
            self.process = start_child(self._command, self._variables)
        except OSError as error:
            logger.warning("scan: nobody watches this run (%s); it is diagnosed afterwards", error)
            return
        relay = RankThread(target=self._relay, args=(self.process,), daemon=True)
        relay.start()
        # Asleep until it is told to end, or the watcher's last word was heard: no polling beside training.
        self._stir.wait()
        if self._closed.is_set():
            end_child(self.process, _SECONDS_TO_END)
            relay.join(1.0)
            return
        logger.warning(
            "scan: the process that watches this run ended with code %d; training goes on, "
            "`mt-megatron scan report` still diagnoses it",
            self.process.wait(),
        )

    def _relay(self, process: subprocess.Popen[bytes]) -> None:
        try:
            relay_lines(process, self._say)
        finally:
            self._stir.set()
