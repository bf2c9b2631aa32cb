"""Tells people of a finding while the run goes on: a log line, ``alerts.jsonl``, a webhook, Prometheus.

It belongs into the watcher's process: nothing here runs in a training process, and nothing here raises
once it has started. What fails is said once and the other ways go on.

``Webhook`` posts JSON from a thread of its own: retried, bounded, and in nobody's way.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.scan.findings.finding import SURE, Finding
from mt_megatron.scan.findings.text import cost, headline, next_step, rank_list
from mt_megatron.scan.format.recording_end import Ended
from mt_megatron.scan.format.run_files import append_record

from .metrics_endpoint import LOOPBACK, Endpoint, Metrics

_PREFIX = "mt_megatron_scan_"
REPEAT_AFTER_S = 3600.0
"""The same culprit is told again after this time at the earliest."""

OVER_AFTER_STEPS = 10
"""A finding whose last step lies further back is over, and its figures end."""


# Prometheus wants the unit in the name; of a share it is "ratio".
_OF_A_FINDING = ("finding_lost_ratio", "finding_confidence_ratio")


def say_line(line: str) -> None:
    """Print to the standard error stream."""
    # Whoever reads it may be gone with the run; the alert is still written and posted.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class Alerts:
    """The ways by which findings reach people. Use as a context manager or call ``close``."""

    def __init__(
        self,
        scan_folder: Path,
        *,
        webhook: str | None = None,
        prometheus_port: int | None = None,
        prometheus_address: str = LOOPBACK,
        prometheus_hosts: Collection[str] = (),
        say: Callable[[str], None] = say_line,
        least_confidence: float = SURE,
        repeat_after_s: float = REPEAT_AFTER_S,
    ) -> None:
        """``scan_folder``: RUN/scan, where ``alerts.jsonl`` grows. ``prometheus_port``: 0 for any free one;
        ``prometheus_address`` and ``prometheus_hosts``: as of ``metrics_endpoint.Endpoint``. Raises
        ``ConfigError`` for a wrong address or a port that is taken."""
        self._file: Path | None = scan_folder / "alerts.jsonl"
        self._run = scan_folder.parent.name
        self._say = say
        self._least, self._repeat_after = least_confidence, repeat_after_s
        self._told: dict[tuple[object, ...], float] = {}
        self._ended: set[tuple[int, int]] = set()
        self.metrics = _declared()
        self.endpoint: Endpoint | None = None
        if prometheus_port is not None:
            self.endpoint = Endpoint(
                self.metrics, prometheus_port, address=prometheus_address, hosts=prometheus_hosts
            )
            if self.endpoint.is_public:
                say(
                    f"scan: Prometheus figures at {self.endpoint.url}, for every machine that reaches this "
                    "address; there is no password"
                )
        try:
            self.webhook = None if webhook is None else Webhook(webhook, say=say)
        except Exception:
            if self.endpoint is not None:
                self.endpoint.close()
            raise

    def __enter__(self) -> Alerts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def finding(
        self,
        finding: Finding,
        *,
        named_at_step: int,
        time_unix: float | None = None,
        one_host: bool = False,
    ) -> bool:
        """Tell of ``finding`` unless it is too unsure or was told not long ago. True: it was told.
        ``one_host``: the whole run is on one host."""
        at = time.time() if time_unix is None else time_unix
        self._show(finding)
        # A culprit of unknown cause is nobody to wake somebody for; a hang is, however it came about.
        if finding.confidence < self._least and finding.cause != "hang":
            return False
        key = (finding.cause, finding.ranks, finding.group)
        if key in self._told and at - self._told[key] < self._repeat_after:
            return False
        self._told[key] = at
        self.metrics.add(_PREFIX + "alerts_total", cause=finding.cause)
        text = (
            f"{headline(finding)}: {cost(finding)} (confidence {finding.confidence:.2f}, "
            f"named at step {named_at_step}). {next_step(finding, one_host=one_host)}"
        )
        record = {
            "time_unix": at,
            "run": self._run,
            "named_at_step": named_at_step,
            "text": text,
            "finding": finding.to_dict(),
        }
        self._tell(record)
        return True

    def standing(self, findings: Iterable[Finding], *, step: int) -> None:
        """What the last judgement, up to ``step``, says of all steps in view: the gauges of everything else
        end, and of what was over long before. A hang has no end but the next step."""
        there = [
            each for each in findings if each.cause == "hang" or each.last_step >= step - OVER_AFTER_STEPS
        ]
        lost, confidence = _OF_A_FINDING
        self.metrics.replace(_PREFIX + lost, [(_labels(each), each.lost_fraction) for each in there])
        self.metrics.replace(_PREFIX + confidence, [(_labels(each), each.confidence) for each in there])

    def recording_ended(self, ended: Mapping[int, Ended], hosts: Mapping[int, str]) -> bool:
        """Tell once which ranks' tracing failed; those that closed theirs in good order are no news.
        True: there was something new."""
        failed = {rank: each for rank, each in sorted(ended.items()) if each.how == "failed"}
        self.metrics.set(_PREFIX + "ranks_not_recording", float(len(failed)))
        new = {rank: each for rank, each in failed.items() if (rank, each.session) not in self._ended}
        if not new:
            return False
        self._ended |= {(rank, each.session) for rank, each in new.items()}
        self.metrics.add(_PREFIX + "alerts_total", cause="recording_ended")
        # Ranks of one full disk end within a second of each other, for the same reason.
        alike: dict[tuple[str, int], list[int]] = {}
        for rank, each in new.items():
            alike.setdefault((each.why, each.iteration), []).append(rank)
        for ranks in alike.values():
            first = new[ranks[0]]
            where = sorted({hosts[rank] for rank in ranks if hosts.get(rank)})
            text = (
                f"{'Rank' if len(ranks) == 1 else 'Ranks'} {rank_list(ranks)}"
                f"{f' ({_few(where)})' if where else ''} no longer recorded: {first.words()}. "
                "Training goes on; what happens there from then on is not seen."
            )
            about = {"ranks": ranks, **asdict(first)}
            self._tell({"time_unix": time.time(), "run": self._run, "text": text, "recording_ended": about})
        return True

    def _show(self, finding: Finding) -> None:
        lost, confidence = _OF_A_FINDING
        self.metrics.set(_PREFIX + lost, finding.lost_fraction, **_labels(finding))
        self.metrics.set(_PREFIX + confidence, finding.confidence, **_labels(finding))

    def _tell(self, record: Mapping[str, object]) -> None:
        self._say(f"scan: {record['text']}")
        self._append(record)
        if self.webhook is not None:
            self.webhook.post(record)

    def progress(self, *, step: int, step_seconds: float, ranks_seen: int) -> None:
        """Figures of the last step that all ranks have finished, for Prometheus."""
        self.metrics.set(_PREFIX + "step", float(step))
        self.metrics.set(_PREFIX + "step_seconds", step_seconds)
        self.metrics.set(_PREFIX + "ranks_seen", float(ranks_seen))

    def close(self, timeout: float = 5.0) -> None:
        """Deliver what waits (``timeout`` seconds at most) and stop listening."""
        if self.webhook is not None:
            self.webhook.close(timeout)
        if self.endpoint is not None:
            self.endpoint.close()

    def _append(self, record: Mapping[str, object]) -> None:
        if self._file is None:
            return
        try:
            append_record(self._file, record)
        except OSError as error:
            self._say(f"scan: alerts are no longer kept in {self._file}: {error}")
            self._file = None


def _labels(finding: Finding) -> dict[str, str]:
    return {
        "cause": finding.cause,
        "ranks": ",".join(map(str, finding.ranks)),
        "host": finding.host or "",
    }


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _declared() -> Metrics:
    metrics = Metrics()
    for name, kind, about in (
        ("step", "gauge", "Last step that all ranks seen have finished"),
        ("step_seconds", "gauge", "Seconds of that step"),
        ("ranks_seen", "gauge", "Ranks whose trace is readable"),
        ("ranks_not_recording", "gauge", "Ranks whose tracing failed while training goes on"),
        (_OF_A_FINDING[0], "gauge", "Share of the time that a culprit costs, while it does"),
        (_OF_A_FINDING[1], "gauge", "Confidence in a culprit, 0 to 1, while it is one"),
        ("alerts_total", "counter", "Alerts sent, by cause"),
    ):
        metrics.declare(_PREFIX + name, kind, about)
    return metrics


_WAITING = 64
_WAITING_BYTES = 4 << 20


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive elsewhere, as a GET without its body."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook:
    """Delivers objects to ``url`` one after the other.

    An answer of 2xx counts as delivered. No answer, 429 and 5xx are tried again, ``attempts`` times in
    all with pauses of 1, 4, 16 ... ``pause`` seconds; anything else is given up at once. What cannot be
    delivered is said to ``say`` once each. The address may carry a secret and is shown as its host only.
    """

    def __init__(
        self,
        url: str,
        *,
        say: Callable[[str], None],
        timeout: float = 5.0,
        attempts: int = 3,
        pause: float = 1.0,
    ) -> None:
        """``timeout`` and ``pause`` in seconds. Raises ``ConfigError`` for what is no http(s) address."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"the webhook is a {parts.scheme or 'relative'!r} address. "
                "Expected http://HOST/... or https://HOST/..."
            )
        self.host = parts.hostname
        self.delivered = self.lost = 0
        self._url, self._say = url, say
        self._timeout, self._attempts, self._pause = timeout, attempts, pause
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._queue: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._waiting_bytes = 0
        self._counting = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mt-megatron-webhook", daemon=True)
        self._thread.start()

    def post(self, body: Mapping[str, Any]) -> None:
        """Queue ``body``; returns at once. 64 wait at most, and 4 MiB."""
        data = json.dumps(body).encode()
        with self._counting:
            fits = self._waiting_bytes + len(data) <= _WAITING_BYTES
            self._waiting_bytes += len(data) * fits
        if not fits:
            self._lose(f"{len(data)} bytes, and more than {_WAITING_BYTES} would wait")
            return
        try:
            self._queue.put_nowait(data)
        except queue.Full:
            with self._counting:
                self._waiting_bytes -= len(data)
            self._lose(f"{_WAITING} alerts wait already")

    def close(self, timeout: float = 5.0) -> None:
        """Give what is queued ``timeout`` seconds, without further retries, and end."""
        self._closing.set()
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (body := self._queue.get()) is not None:
            delivered = self._deliver(body)
            # Room before word of it: whoever sees that one is delivered may post the next.
            with self._counting:
                self._waiting_bytes -= len(body)
            self.delivered += delivered

    def _deliver(self, body: bytes) -> bool:
        problem = ""
        for attempt in range(self._attempts):
            if attempt and self._closing.wait(self._pause * 4 ** (attempt - 1)):
                break
            request = urllib.request.Request(
                self._url, data=body, headers={"Content-Type": "application/json"}, method="POST"
            )
            try:
                with self._open(request, timeout=self._timeout):
                    return True
            except urllib.error.HTTPError as error:
                problem = f"it answered {error.code}"
                error.close()
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, ValueError) as error:
                # A reason, never the address: urllib's own message may repeat it.
                problem = type(getattr(error, "reason", error)).__name__
        self._lose(problem)
        return False

    def _lose(self, problem: str) -> None:
        self.lost += 1
        self._say(
            f"scan: an alert did not reach the webhook at {self.host}: {problem} ({self.lost} lost so far)"
            if self.lost > 1
            else f"scan: an alert did not reach the webhook at {self.host}: {problem}"
        )
