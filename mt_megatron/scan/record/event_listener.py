"""Hears ``seams.events`` at the level that is wanted, and changes level between two steps only.

Hooks and profilers may be put on and taken off nowhere else: torch walks over a module's hooks while
the training thread is inside it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

from mt_megatron.seams import events

from .encoder import FORGET, STEP_ENDED
from .levels import LEVELS, Level, Window, level_at, level_of
from .queues import Queues

logger = logging.getLogger("mt_megatron")

LevelCallback = Callable[[Level, Level], None]

_BOUNDARIES: frozenset[events.EventName] = frozenset({"step", "optimizer"})
"""Events after which the level may change: they are heard one by one, all others only queued."""

_AT_FULL: frozenset[events.EventName] = frozenset(get_args(events.EventName)) - _BOUNDARIES
_AT_BASE = _AT_FULL - {"layer"}


class Listening:
    """Fills ``queues.events``. ``start`` and ``stop`` belong to the training thread."""

    def __init__(
        self,
        queues: Queues,
        level: Level,
        window: Window | None,
        *,
        changed: Callable[[Level, Level], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """``changed(old, new)`` hears of each change in the training thread, ``failed`` of errors in here."""
        self.iteration = 0
        """The step that began last, or in a program without step events how many have ended."""
        self.level: Level = "off"
        """What is heard now."""
        self._queues = queues
        self._wanted, self._window = level_of(level), window
        self._changed = changed
        self._failed = failed
        self._running = False
        self._stop_hearing: Callable[[], None] | None = None
        # A level is chosen in the training thread and in the one that reads the control file.
        self._changing = threading.RLock()
        self._has_steps = False
        self._optimizers = 0

    def start(self) -> None:
        """Listen from now on."""
        self._running = True
        self._apply(level_at(self._wanted, self._window, self.iteration + 1))

    def stop(self) -> None:
        """Listen no longer, for good."""
        self._running = False
        self._apply("off")

    def give_up(self) -> None:
        """Record nothing from now on, because something failed; any thread.

        Whoever follows the level hears of it where the next step begins.
        """
        self._running = False
        with self._changing:
            self._unsubscribe()
            if self.level != "off":
                self._stop_hearing = events.subscribe(self._farewell, _BOUNDARIES)

    def silence(self) -> None:
        """Hear nothing from now on and tell nobody."""
        self._running = False
        self._unsubscribe()

    def _farewell(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        if (phase == "begin" and name == "step") or (name == "optimizer" and not self._has_steps):
            self._apply("off")

    def want_level(self, level: Level) -> None:
        """Hear ``level`` from the next step on; any thread. Raises ``ConfigError``."""
        with self._changing:
            self._wanted = level_of(level)
            self._await_step()

    def want_window(self, window: Window | None) -> None:
        """Hear the steps of ``window`` at its level, from the next step on; any thread."""
        with self._changing:
            self._window = window
            self._await_step()

    def _await_step(self) -> None:
        """While nothing is recorded: hear where a step begins.

        As long as somebody hears them, operations are counted. Ranks follow the control file at different
        steps: one that stopped counting for some of them would give other numbers to the same operations.
        """
        if self._running and self.level == "off" and self._stop_hearing is None:
            self._stop_hearing = events.subscribe(self._steps, _BOUNDARIES)

    def _at_step(self, iteration: int) -> None:
        self.iteration = iteration
        self._queues.bound()
        with self._changing:
            level = level_at(self._wanted, self._window, iteration)
            if level != self.level:
                self._apply(level)

    def _apply(self, level: Level) -> None:
        with self._changing:
            old, self.level = self.level, level
            self._unsubscribe()
            if level != "off":
                self._stop_hearing = self._hear(level)
            elif self._running:
                # The ends of what is open now will not be heard.
                self._queues.events.append((time.perf_counter_ns(), 0, FORGET, "", {}))
                self._await_step()
        if old != level:
            self._changed(old, level)

    def _unsubscribe(self) -> None:
        stop, self._stop_hearing = self._stop_hearing, None
        if stop is not None:
            stop()

    def _hear(self, level: Level) -> Callable[[], None]:
        """Queue what ``level`` records; returns what ends that."""
        full = LEVELS.index(level) >= LEVELS.index("full")
        stop_recording = events.record(self._queues.events.append, _AT_FULL if full else _AT_BASE)
        stop_listening = events.subscribe(self._between, _BOUNDARIES)

        def stop() -> None:
            stop_recording()
            stop_listening()

        return stop

    def _between(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        """The listener while something is recorded."""
        self._queues.events.append((time.perf_counter_ns(), threading.get_ident(), phase, name, attrs))
        # Each call costs, as the processor's caches have long forgotten all this.
        if not self._has_steps or (phase == "begin" and name == "step"):
            self._boundary(phase, name, attrs)

    def _steps(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        """The listener while nothing is recorded."""
        self._boundary(phase, name, attrs)
        if phase == "begin" and name == "step" and self.level != "off":
            # The listener that has taken over did not hear of this begin.
            self._queues.events.append((time.perf_counter_ns(), threading.get_ident(), phase, name, attrs))

    def _boundary(self, phase: str, name: str, attrs: Mapping[str, Any]) -> None:
        """A step begins, or in a program without step events the outermost optimizer has ended."""
        try:
            if name == "step":
                self._has_steps = True
                if phase == "begin":
                    self._at_step(int(attrs.get("iteration", self.iteration + 1)))
            elif not self._has_steps:
                self._optimizers = max(0, self._optimizers + (1 if phase == "begin" else -1))
                if phase == "end" and self._optimizers == 0:
                    if self.level != "off":
                        moment: events.Moment = (
                            time.perf_counter_ns(),
                            threading.get_ident(),
                            STEP_ENDED,
                            "step",
                            {},
                        )
                        self._queues.events.append(moment)
                    self._at_step(self.iteration + 1)
        except Exception as error:  # noqa: BLE001 - what is raised here, the step would raise
            self._failed(error)
