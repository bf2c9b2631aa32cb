"""Follower of the merged recording of all nodes while it grows: events for the page, alerts, sinks.

Runs in a thread of node 0's sidecar. Steps are taken in order, each once: when all ranks have reported it,
or ``PATIENCE_SECONDS`` after it was first seen, with what is there.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mt_megatron.scan.format.run_files import append_record
from mt_megatron.scope.recording.combining import HOLD_SECONDS
from mt_megatron.scope.recording.data import Dropped, Session, Steps, Value
from mt_megatron.scope.recording.files import ScopeFiles
from mt_megatron.scope.recording.reader import Recording, open_recording
from mt_megatron.scope.recording.writer import TICK_SECONDS, Alert, Writer

from .alerts import AlertModel, as_map
from .keeper import Keeper
from .sinks.base import Sink
from .sinks.queued import QueuedSink

PERIOD_SECONDS = 0.25
LARGEST_SHARE = 0.1
"""Of one processor: where a look takes long, the next one waits longer."""

PATIENCE_SECONDS = 5.0
"""A step that lacks ranks is taken after this time: a rank or its node has no recording."""

OTHERS_SECONDS = 2.0
"""At the end, for what other nodes have not written yet."""

CLOSE_SECONDS = 15.0
"""At the end, for the last look: a sink may wait for its server."""

MOST_INDICES = 256
"""Tensors of one notice: the page's websocket cuts longer lists off."""

MOST_STEPS = 256
"""Taken in one look."""

SessionKey = tuple[str, int]
"""Name and attempt."""

_COLUMNS = ("seconds", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "memory_bytes")


class Follower:
    """Follower of one run: ``look`` once in a while, or ``start`` a thread that does."""

    def __init__(
        self,
        files: ScopeFiles,
        *,
        keeper: Keeper | None = None,
        before: Mapping[SessionKey, tuple[int, int]] = MappingProxyType({}),
        publish: Callable[[Mapping[str, Any]], None] = lambda _: None,
        open_sinks: Callable[[], Sequence[Sink]] = tuple,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``before``: sessions that another follower has taken, as ``Writer.before`` has them. ``open_sinks``
        is called at the first look."""
        self._files = files
        self._keeper = keeper
        self._before = before
        self._publish = publish
        self._open_sinks = open_sinks
        self._sinks: list[Sink] | None = None
        self._say = say
        self._recording: Recording | None = None
        self._model = AlertModel()
        self._session: Session | None = None
        self._step = self._sample = -1
        self._listed: tuple[int, ...] = ()
        self._lacks = False
        """Whether a step waits for parts of ranks that another node may still write."""

        self._seen: dict[tuple[str, int], float] = {}
        self._usual: set[tuple[str, str]] | None = None
        """Module and statistic of all values of the session's samples; None: none yet."""

        self._tensors: dict[str, int] = {}
        self._token_steps: set[int] = set()
        self._drops: dict[tuple[str, int], int] = {}
        self._absent: set[int] = set()
        """Ranks without a recording of the step before."""

        self._lacking: set[int] = set()
        """Ranks of the start with an alert that nothing is recorded of them."""

        self._refusing: set[tuple[str, int]] = set()
        """Starts and ranks with an alert about frames that the checks refuse."""

        self._told: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scope-follower", daemon=True)

    def start(self) -> None:
        """Follow in a thread until ``close``."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and the sinks after a last look."""
        self._over.set()
        if self._thread.ident is None:
            self._finish()
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._say(
                "scope: no alert judged the last steps, and sinks lack them: a sink does not answer, or the "
                "machine is busy"
            )

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.process_time()
            self._guarded(self.look)
            used = time.process_time() - began
            self._over.wait(max(PERIOD_SECONDS, used / LARGEST_SHARE))
        self._finish()

    def _finish(self) -> None:
        # Other nodes write their last step at about the same time; it may be the one with the first NaN.
        until = time.monotonic() + OTHERS_SECONDS
        self._guarded(self.look)
        while self._lacks and time.monotonic() < until:
            time.sleep(OTHERS_SECONDS / 20)
            self._guarded(self.look)
        self._guarded(lambda: self.look(final=True))
        for sink in self._sinks or ():
            if isinstance(sink, QueuedSink):
                sink.begin_to_close()  # they are waited for at the same time
        for sink in self._sinks or ():
            self._guarded(sink.close)
        if self._recording is not None:
            self._recording.close()

    def _guarded(self, what: Callable[[], None]) -> None:
        """Whatever goes wrong here is told once and costs the recording nothing."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - a sink is a foreign package, the disk may fail
            text = f"scope: {type(error).__name__}: {error}"
            if text not in self._told and len(self._told) < 20:
                self._told.add(text)
                self._say(text)

    def look(self, *, final: bool = False) -> None:
        """Take what is new. Raises ``ScopeError`` where the recording cannot be read."""
        if self._sinks is None:
            self._sinks = list(self._open_sinks())
        if self._recording is None:
            if not self._files.nodes():
                return
            self._recording = open_recording(self._files.root)
        self._lacks = False
        sessions = self._recording.sessions()
        for session in sessions[self._first_of(sessions) :]:
            if self._session is None or _key(session) != _key(self._session):
                self._begin(session)
            self._session = session
            later = sessions[session.number + 1 :]
            ended = final or self._is_over(session, later)
            self._take_steps(self._recording, session, final=ended)
            self._take_samples(self._recording, session, final=ended)
            self._take_tensors(self._recording, session)
            self._take_drops(self._recording, session)
            if later and not ended:
                return  # what is missing here comes before anything of the later ones

    def _is_over(self, session: Session, later: Sequence[Session]) -> bool:
        """True where no rank sends more of ``session``: all are in a ``later`` one, or that is of another
        start. Ranks that have not rewound are waited for ``PATIENCE_SECONDS``."""
        if not later:
            return False
        if any(each.name != session.name for each in later):
            return True
        self._see("session", [session.number])
        ranks = {rank for each in later for rank in each.ranks}
        return len(ranks) >= session.world_size or self._waited("session", session.number)

    def _first_of(self, sessions: Sequence[Session]) -> int:
        """Index of the first session that is not taken yet: the one under way, else the first new one."""
        keys = [_key(each) for each in sessions]
        if self._session is not None and _key(self._session) in keys:
            return keys.index(_key(self._session))
        return next((index for index, key in enumerate(keys) if key not in self._before), len(keys) - 1)

    def _begin(self, session: Session) -> None:
        self._step, self._sample = self._before.get(_key(session), (-1, -1))
        self._seen.clear()
        self._usual = None
        self._tensors.clear()
        self._token_steps.clear()
        self._drops.clear()
        same_start = self._session is not None and self._session.name == session.name
        if not same_start:
            self._lacking.clear()
            self._absent.clear()
        self._model.restart(same_start=same_start)
        self._model.modules(())
        self._listed = ()

    # Steps and statistics.

    def _missing(
        self, recording: Recording, session: Session, step: int, *, whole: bool, final: bool
    ) -> None:
        """An alert about ranks without a recording of two steps in a row, or of the last one: once a start
        and rank. ``whole``: all ranks are there."""
        absent = set() if whole else set(range(session.world_size))
        if absent:
            absent -= {each.rank for each in recording.rank_steps(step, session.number)}
        if not self._waited("step", step):
            absent -= set(session.ranks)  # a run may end within a step
        missing = sorted((absent if final else absent & self._absent) - self._lacking)
        self._absent = absent
        if not missing:
            return
        self._lacking.update(missing)
        named = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        text = (
            f"nothing is recorded of {len(missing)} of {session.world_size} ranks at step {step}: {named}. "
            "Their logs say why"
        )
        self._alert("missing ranks", step, float(len(missing)), text, session)

    def _alert(self, kind: str, step: int, value: float, text: str, session: Session) -> None:
        """An alert about the recording itself."""
        alert = Alert(
            step=step, kind=kind, path="", statistic="", value=value, low=math.nan, high=math.nan, text=text
        )
        self._tell([alert], session)

    def _take_steps(self, recording: Recording, session: Session, *, final: bool) -> None:
        steps = recording.steps(first=self._step + 1, session=session.number)
        self._see("step", steps.step.tolist())
        for index in range(min(len(steps.step), 2**62 if final else MOST_STEPS)):
            step = int(steps.step[index])
            whole = int(steps.ranks[index]) >= session.world_size
            if not (whole or final or self._waited("step", step)):
                self._lacks = len(recording.nodes()) > 1
                return
            self._missing(recording, session, step, whole=whole, final=final)
            self._step = step
            del self._seen["step", step]
            event = step_event(steps, index)
            self._publish(event)
            alerts = self._model.step(
                self._step,
                loss=float(steps.loss[index]),
                grad_norm=float(steps.grad_norm[index]),
                skipped=bool(steps.skipped[index]),
                known=whole and not session.missing_ranks,
            )
            self._tell(alerts, session)
            numbers = {name: event[name] for name in _COLUMNS if event[name] is not None}
            self._sink(self._step, {f"run/{name}": value for name, value in numbers.items()})

    def _take_samples(self, recording: Recording, session: Session, *, final: bool) -> None:
        steps = recording.sampled(first=self._sample + 1, session=session.number)
        self._see("sample", steps)
        for step in steps:
            # Before its values are read: what came since would be missing.
            passed = _passed(recording, session, step)
            if passed:
                self._see("passed", [step])
            values = recording.values(step, session=session.number, vectors=True)
            # An evaluation comes after some steps alone, and later than the rest of its step.
            pairs = {(each.path, each.statistic) for each in values if each.statistic != "validation_loss"}
            # Of a pipeline stage that is late all values are missing, not only parts.
            known = passed if self._usual is None else self._usual <= pairs
            complete = known and not any(each.partial for each in values)
            # Whose part was dropped is held back by the writer for a while.
            settled = passed and self._waited("passed", step, HOLD_SECONDS + 2 * TICK_SECONDS)
            if not (complete or settled or final or self._waited("sample", step)):
                self._lacks = len(recording.nodes()) > 1
                return
            self._sample, self._usual = step, pairs | (self._usual or set())
            del self._seen["sample", step]
            self._seen.pop(("passed", step), None)
            if not values or self._is_beside(recording, session):
                continue
            self._publish(
                {
                    "k": "stats",
                    "step": step,
                    "session": session.number,
                    "values": [
                        [each.path, each.statistic, _plain(each.value), each.partial] for each in values
                    ],
                }
            )
            if session.ranks != self._listed:
                # Large runs have millions of modules' rows: they are read when a rank came, not each time.
                self._listed = session.ranks
                self._model.modules(each.path for each in recording.modules(session.number))
            skipped = bool(recording.steps(step, step, session.number).skipped.any())
            self._tell(self._model.statistics(step, values, skipped=skipped), session)
            self._sink(step, sink_names(values))

    def _is_beside(self, recording: Recording, session: Session) -> bool:
        """True where the samples of ``session`` are of a step that was made beside the run."""
        if session.first_step is not None:
            return False
        # The first sample may have come since the sessions were read; its session's first step came with it.
        now = {_key(each): each for each in recording.sessions()}
        return now[_key(session)].first_step is None

    def _see(self, what: str, steps: Iterable[int]) -> None:
        """Each step has its own patience from when it was first seen, so that a node without a recording does
        not hold up all later ones one after the other."""
        now = time.monotonic()
        for step in steps:
            self._seen.setdefault((what, step), now)

    def _waited(self, what: str, step: int, seconds: float = PATIENCE_SECONDS) -> bool:
        """Whether ``step`` was seen first so long ago that nothing more is waited for."""
        return time.monotonic() - self._seen[what, step] >= seconds

    # The rest.

    def _take_tensors(self, recording: Recording, session: Session) -> None:
        for node in recording.nodes():
            own = node.session(session)
            last = self._tensors.get(str(node.path), 0)
            rows = node.rows(
                "SELECT tensor.id, step, text, what, microbatch, shape, indices FROM tensor "
                "JOIN path ON path.id = tensor.path WHERE session=? AND tensor.id>? "
                "ORDER BY tensor.id LIMIT 1000",
                (own, last),
            )
            # Heads are tensors of their own: a notice of each would be most of what browsers are sent.
            alike: dict[tuple[Any, ...], list[Any]] = {}
            for number, *about, indices in rows:
                self._tensors[str(node.path)] = number
                alike.setdefault(tuple(about), []).append(json.loads(indices))
            parts = [
                (about, indices[first : first + MOST_INDICES])
                for about, indices in alike.items()
                for first in range(0, len(indices), MOST_INDICES)
            ]
            for (step, path, what, microbatch, shape), indices in parts:
                self._publish(
                    {
                        "k": "tensor",
                        "step": step,
                        "session": session.number,
                        "path": path,
                        "what": what,
                        "microbatch": microbatch,
                        "indices": indices,
                        "shape": json.loads(shape),
                    }
                )
        for step in recording.token_steps(session.number):
            if step not in self._token_steps:
                self._token_steps.add(step)
                self._publish({"k": "tokens", "step": step, "session": session.number})

    def _take_drops(self, recording: Recording, session: Session) -> None:
        for each in recording.dropped():
            key = (each.source, each.rank)
            if each.session == session.number and self._drops.get(key) != each.frames:
                self._drops[key] = each.frames
                self._publish(
                    {
                        "k": "dropped",
                        "source": each.source,
                        "rank": each.rank,
                        "frames": each.frames,
                        "bytes": each.bytes,
                    }
                )
                if each.source == "checks" and each.frames > 1:
                    self._refuses(each, session)

    def _refuses(self, dropped: Dropped, session: Session) -> None:
        """One alert for each start and rank: a single frame may be damaged, more come from a defect."""
        if (session.name, dropped.rank) in self._refusing:
            return
        self._refusing.add((session.name, dropped.rank))
        text = (
            f"{dropped.frames} frames of rank {dropped.rank} were refused: what they say is not recorded. "
            f"The sidecar's log, {self._files.root}/node-*.log, has the reason"
        )
        self._alert("refused frames", dropped.step, float(dropped.frames), text, session)

    def _tell(self, alerts: Sequence[Alert], session: Session) -> None:
        for each in alerts:
            alert = replace(each, time_ns=time.time_ns())
            if self._keeper is not None:
                self._keeper.call(partial(_kept, alert, (session.name, session.attempt)))
            found = as_map(alert, session.number)
            self._publish({"k": "alert", **found})
            self._guarded(partial(append_record, self._files.alerts, found))

    def _sink(self, step: int, numbers: Mapping[str, float]) -> None:
        sinks = self._sinks or []
        for sink in tuple(sinks):
            try:
                sink.record(step, numbers)
            except Exception as error:  # noqa: BLE001 - a foreign package: its troubles end it alone
                sinks.remove(sink)
                self._say(f"scope: nothing more goes to {sink.title} ({type(error).__name__}: {error})")


def _passed(recording: Recording, session: Session, step: int) -> bool:
    """True where all ranks, also those that are not known yet, have reported a later step, and so have sent
    all of ``step`` that they will."""
    later = 0
    for node in recording.nodes():
        rows = node.rows(
            "SELECT count(DISTINCT rank) FROM rank_step WHERE session=? AND step>?",
            (node.session(session), step),
        )
        later += rows[0][0]
    return later >= session.world_size


def _key(session: Session) -> SessionKey:
    return session.name, session.attempt


def _kept(alert: Alert, session: tuple[str, int], writer: Writer) -> None:
    writer.alert(alert, session)


def step_event(steps: Steps, index: int) -> dict[str, Any]:
    """The event ``step`` of one row of ``steps``."""
    return {
        "k": "step",
        "step": int(steps.step[index]),
        "session": int(steps.session[index]),
        "time_ns": int(steps.time_ns[index]),
        "skipped": bool(steps.skipped[index]),
        "perturbed": bool(steps.perturbed[index]),
        **{name: _plain(float(getattr(steps, name)[index])) for name in _COLUMNS},
    }


def sink_names(values: Sequence[Value]) -> dict[str, float]:
    """Whole values by names as sinks group them: the statistic, then the module."""
    return {f"{each.statistic}/{each.path or 'model'}": each.value for each in values if each.whole}


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
