"""Evidence of a hang from inside the rank: Python stacks and pending collectives, once nothing moves.

About once a second it is looked whether the rank got on. When it did not for five seconds it leaves a note
of what ``"stack"`` in the trace; the run goes on undisturbed. A rank that is stopped as a whole leaves none:
that it is silent is what the others' traces show.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("mt_megatron")

STALL_SECONDS = 5.0
PERIOD_SECONDS = 1.0
_FRAMES = 24
_NOTES_PER_STALL = 4


class StallWatch:
    """Watches this process, in somebody else's thread: each one that wakes holds the training up a little."""

    def __init__(
        self,
        progress: Callable[[], object],
        note: Callable[[Mapping[str, Any]], None],
        *,
        after: float = STALL_SECONDS,
        period: float = PERIOD_SECONDS,
    ) -> None:
        """``progress()`` changes whenever the rank gets on (a count of events); ``note`` takes what is found:
        ``what`` ("stack"), ``silent_seconds``, ``stacks`` (thread name -> frames, innermost last),
        ``waiting`` (op, group, number, ranks, sizes of collectives that have not ended) and ``entered``
        (group -> number of the last collective begun). Both are called by ``look``, which should come
        about every ``period`` seconds."""
        self._progress = progress
        self._note = note
        self._after = after
        self._period = period
        self._failed = False
        self._last = progress()
        self._since = self._before = time.monotonic()
        self._said = 0

    def look(self) -> None:
        """Whether the rank got on since the last look; what fails is said once and ends it."""
        if self._failed:
            return
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - tracing never ends training
            self._failed = True
            logger.warning("this rank no longer looks for stalls: %s: %s", type(error).__name__, error)

    def _look(self) -> None:
        now, seen = time.monotonic(), self._progress()
        if now - self._before > 3 * self._period:
            # The whole process stood still (stopped, suspended): that is no stall of its own making.
            self._since += now - self._before
        self._before = now
        if seen != self._last:
            self._last, self._since, self._said = seen, now, 0
        elif self._said < _NOTES_PER_STALL and now - self._since > self._after * 2**self._said:
            # Again after twice the time: whether it still stands at the same place is evidence too.
            self._said += 1
            self._note(evidence(now - self._since))


def evidence(silent_seconds: float) -> dict[str, Any]:
    """Where this process is now; the note described at ``StallWatch``."""
    found: dict[str, Any] = {
        "what": "stack",
        "silent_seconds": round(silent_seconds, 3),
        "stacks": python_stacks(),
        "waiting": [],
        "entered": {},
    }
    if "torch.distributed" in sys.modules:
        from mt_megatron.backends.distributed.flight_recorder import waiting_collectives

        with contextlib.suppress(Exception):  # a library without a record is no reason to lose the stacks
            waiting, entered = waiting_collectives()
            found["waiting"] = [
                {
                    "op": one.op,
                    "group": one.group,
                    "number": one.number,
                    "ranks": one.ranks,
                    "sizes": one.sizes,
                }
                for one in waiting
            ]
            found["entered"] = entered
    return found


def python_stacks() -> dict[str, list[str]]:
    """Thread name -> its Python frames, innermost last; the calling thread is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    stacks: dict[str, list[str]] = {}
    for ident, frame in sys._current_frames().items():
        if ident == own:
            continue
        frames = traceback.extract_stack(frame)[-_FRAMES:]
        name = names.get(ident, f"thread {ident}")
        stacks[name] = [f"{one.filename}:{one.lineno} in {one.name}" for one in frames]
    return stacks
