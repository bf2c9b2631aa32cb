"""What a rank does beside recording: notes of stalls, faults it is asked for, measurements.

The recorder's background thread looks for stalls and for small files that have changed, since every thread
that wakes holds the training up a little; what is to be done about them is done in a thread of its own.
Whatever fails is said once and ends that; training goes on.
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

from mt_megatron.backends.threads import RankThread
from mt_megatron.errors import ConfigError
from mt_megatron.scan.drill.faults import Fault, faults_from
from mt_megatron.scan.drill.inject import Injector
from mt_megatron.scan.format.permissions import open_private
from mt_megatron.scan.format.run_files import RunFiles

from .confirm import Request, check_request, measure, request_from
from .measures import measures_everywhere
from .stacks import StallWatch
from .straggler_policy import OnStraggler, StragglerPolicy, exclude

logger = logging.getLogger("mt_megatron")

PERIOD_SECONDS = 0.5
_SELDOM_SECONDS = 10.0


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
    """One per rank. The training thread asks ``wants_*`` after a step; a background thread that wakes anyway
    should call ``look`` (``Recorder.on_look``), else this one wakes twice a second itself."""

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
        self._drills, self._requests = drill_path(files), request_path(files)
        self._rank = rank
        self._world_size = len(hosts)
        self._hosts = [hosts[each] for each in range(len(hosts))]
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
        self._looks = 0
        self._seen: dict[Path, object] = {}
        self._woken = threading.Event()
        self._read_findings = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = RankThread(target=self._run, name="scan-attendant", daemon=True)

    def start(self) -> None:
        """Attend from now on. What was asked for before the start is not done."""
        self._last_request = _text(self._requests)
        self._last_drill = _text(self._drills)
        with contextlib.suppress(OSError):
            self._read_findings = self._files.findings.stat().st_size
        self._thread.start()

    def close(self) -> None:
        """Undo every fault and end the threads."""
        self._stopped.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD_SECONDS + 10.0)
        self._injector.close()

    def look(self) -> None:
        """Whether the rank gets on, and whether something is asked for; quick."""
        self._looks += 1
        self._stalls.look()
        for path in self._watched():
            stamp = _stamp(path)
            if self._seen.get(path) != stamp:
                self._seen[path] = stamp
                self._woken.set()

    def _watched(self) -> tuple[Path, ...]:
        if self._rank != 0:
            return (self._drills,)
        asked = (self._drills, self._requests)
        return asked if self._policy is None else (*asked, self._files.findings)

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
        result = measure(request_from(asked, self._world_size), measures, self._rank, self._hosts)
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
            while True:
                looks = self._looks
                # The end of a drill is written in no file that changes.
                often = self._injector.faults or not looks
                if (
                    not self._woken.wait(PERIOD_SECONDS if often else _SELDOM_SECONDS)
                    and self._looks == looks
                ):
                    self._stalls.look()
                self._woken.clear()
                if self._stopped.is_set():
                    return
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
        text = _text(self._drills)
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
                logger.warning("%s cannot be done: %s", self._drills, error)
        before = self._injector.faults
        self._injector.set(wanted)
        if self._injector.faults != before:
            on = [fault.text() for fault in self._injector.faults]
            _append(drill_log_path(self._files), {"time_unix": time.time(), "rank": self._rank, "on": on})

    def _look_for_request(self) -> None:
        text = _text(self._requests)
        if not text or text == self._last_request:
            return
        self._last_request = text
        try:
            request = request_from(text, self._world_size)
            check_request(request, self._world_size)
        except ConfigError as error:
            logger.warning("%s cannot be measured: %s", self._requests, error)
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


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        handle = open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, (json.dumps(record) + "\n").encode())
        finally:
            os.close(handle)
