"""What a rank does beside recording: notes of stalls, faults it is asked for, measurements.

Two threads of little work look for stalls and read a few small files. Whatever fails in them is said once
and ends them; training goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.scan.act import OnStraggler, StragglerPolicy, exclude
from mt_megatron.scan.confirm import Request, check_request, measure, request_from
from mt_megatron.scan.faults import Fault, faults_from
from mt_megatron.scan.inject import Injector
from mt_megatron.scan.measures import measures_everywhere
from mt_megatron.scan.run_files import RunFiles
from mt_megatron.scan.stalls import StallWatch

logger = logging.getLogger("mt_megatron")

PERIOD_SECONDS = 0.5


def drill_path(files: RunFiles) -> Path:
    """The faults asked for: ``{"until_unix": ..., "faults": [...]}``."""
    return files.root / "inject.json"


def drill_log_path(files: RunFiles) -> Path:
    """What the ranks did about them, one JSON object a line; no part of the trace, so that no diagnosis
    can peep."""
    return files.root / "drills.jsonl"


def request_path(files: RunFiles) -> Path:
    """The measurement asked for."""
    return files.root / "measure.json"


def measurements_path(files: RunFiles) -> Path:
    """What was measured, one JSON object a line."""
    return files.root / "measurements.jsonl"


class Attendant:
    """One per rank. The training thread calls ``wants_*`` before a step and ``after_step`` after it."""

    def __init__(
        self,
        files: RunFiles,
        *,
        rank: int,
        hosts: Mapping[int, str],
        backend: Any,
        progress: Callable[[], object],
        note: Callable[[Mapping[str, Any]], None],
        on_straggler: OnStraggler = "continue",
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        """``hosts`` of all ranks; ``progress`` and ``note`` as ``StallWatch`` wants them; ``backend`` a
        ``mt_megatron.backends.base.Backend``."""
        self._files = files
        self._rank = rank
        self._world_size = len(hosts)
        self._backend = backend
        self._say = say
        self._stalls = StallWatch(progress, note)
        self._injector = Injector(rank, files.root, backend)
        self._policy: StragglerPolicy | None = None
        if rank == 0 and on_straggler == "checkpoint-and-exit":
            self._policy = StragglerPolicy(hosts, say)
        self._asked: Request | None = None
        self._last_drill = ""
        self._last_request = ""
        self._read_findings = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scan-attendant", daemon=True)

    def start(self) -> None:
        """Attend from now on. What was asked for before the start is not done."""
        self._last_request = _text(request_path(self._files))
        self._last_drill = _text(drill_path(self._files))
        with contextlib.suppress(OSError):
            self._read_findings = self._files.findings.stat().st_size
        self._stalls.start()
        self._thread.start()

    def close(self) -> None:
        """Undo every fault and end the threads."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD_SECONDS + 10.0)
        self._injector.close()
        self._stalls.close()

    @property
    def wants_measurement(self) -> bool:
        """Whether a measurement should follow the next step (rank 0's word counts)."""
        return self._request() is not None

    @property
    def wants_to_leave(self) -> bool:
        """Whether the run should save and end because of a confirmed straggler (rank 0's word counts)."""
        return self._policy is not None and self._policy.leave is not None

    def measure(self) -> None:
        """Collective, between two steps, once the ranks have agreed: about one second."""
        measures = measures_everywhere(self._backend)
        request = self._request()
        if measures is None:
            with self._lock:
                self._asked = None
                if self._policy is not None:
                    self._policy.not_measured()
            if self._rank == 0:
                self._say("nothing is measured: a rank has no memory left for it; training goes on")
            return
        asked = measures.broadcast("" if request is None else request.to_json())
        if not asked:
            return
        result = measure(request_from(asked, self._world_size), measures, self._rank, self._world_size)
        if self._rank != 0:
            return
        self._say(f"measured: {result.text}")
        with self._lock:
            if self._asked is not None and self._asked.identity == result.identity:
                # Another may have been asked for meanwhile.
                self._asked = None
            if self._policy is not None:
                self._policy.measured(result)
                if self._policy.leave is not None:
                    self._write_exclusion()
        _append(measurements_path(self._files), {"time_unix": time.time(), **result.to_dict()})

    def _write_exclusion(self) -> None:
        assert self._policy is not None and self._policy.leave is not None
        try:
            path = exclude(self._files, self._policy.leave)
        except OSError as error:
            self._say(f"{self._policy.leave.host} cannot be listed as excluded: {error}")
        else:
            self._say(f"excluded hosts: {path}")

    def _request(self) -> Request | None:
        with self._lock:
            if self._asked is None and self._policy is not None:
                return self._policy.request
            return self._asked

    def _run(self) -> None:
        try:
            while not self._stopped.wait(PERIOD_SECONDS):
                self._drill()
                if self._rank == 0:
                    self._look_for_request()
                    self._look_for_findings()
        except Exception as error:  # noqa: BLE001 - tracing never ends training
            logger.warning(
                "rank %d no longer takes requests or drills: %s: %s", self._rank, type(error).__name__, error
            )
        finally:
            self._injector.close()

    def _drill(self) -> None:
        text = _text(drill_path(self._files))
        wanted: tuple[Fault, ...] = ()
        if text and text != self._last_drill:
            try:
                given = json.loads(text)
                if float(given["until_unix"]) > time.time():
                    wanted = faults_from(given["faults"])
                else:
                    self._last_drill = text
            except (ValueError, KeyError, TypeError, ConfigError) as error:
                self._last_drill = text
                logger.warning("%s cannot be done: %s", drill_path(self._files), error)
        before = self._injector.faults
        self._injector.set(wanted)
        if self._injector.faults != before:
            on = [fault.text() for fault in self._injector.faults]
            _append(drill_log_path(self._files), {"time_unix": time.time(), "rank": self._rank, "on": on})

    def _look_for_request(self) -> None:
        text = _text(request_path(self._files))
        if not text or text == self._last_request:
            return
        self._last_request = text
        try:
            request = request_from(text, self._world_size)
            check_request(request, self._world_size)
        except ConfigError as error:
            logger.warning("%s cannot be measured: %s", request_path(self._files), error)
            return
        with self._lock:
            self._asked = request

    def _look_for_findings(self) -> None:
        if self._policy is None:
            return
        try:
            with open(self._files.findings, "rb") as file:
                file.seek(self._read_findings)
                data = file.read(1 << 20)
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read_findings += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError), self._lock:
                self._policy.heard(json.loads(line))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, (json.dumps(record) + "\n").encode())
        finally:
            os.close(handle)
