"""Level ``kernel``: windows of torch's profiler, in the same trace as spans of kind ``kernel``.

The profiler has a clock of its own. Markers that are put into each window, between two readings of the
host's clock, say how the two relate. With a device its kernels are kept; without one the operators are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.backends.base import Backend
from mt_megatron.backends.threads import RankThread
from mt_megatron.scan.format.records import KIND, SPAN
from mt_megatron.seams import events

logger = logging.getLogger("mt_megatron")

STEPS_AT_ONCE = 5
"""A window that lasts longer is cut into pieces: the profiler keeps everything in memory until its end."""

_MARKER = "mt_megatron.scan"
_MARKERS = 3
_AT_ONCE = 500
_REST_SECONDS = 0.001


class KernelWindows:
    """Profiles one rank. ``start`` and ``stop`` belong to the training thread, between two steps."""

    def __init__(
        self,
        backend: Backend,
        deliver: Callable[[NDArray[np.void]], None],
        string: Callable[[str], int],
        note: Callable[..., None],
    ) -> None:
        """``deliver`` takes spans, ``string`` numbers a name, ``note`` takes what a window was."""
        self.failed: str | None = None
        self._backend = backend
        self._deliver = deliver
        self._string = string
        self._note = note
        self._profile: Any = None
        self._marks: list[tuple[int, int]] = []
        self._steps: list[tuple[int, int]] = []
        self._first = self._iteration = 0
        self._stop_hearing: Callable[[], None] | None = None
        self._converting: list[RankThread] = []
        self._said = False

    @property
    def on(self) -> bool:
        """Whether a window is open."""
        return self._profile is not None

    def start(self) -> None:
        """Open a window."""
        if self._stop_hearing is None and self.failed is None:
            self._stop_hearing = events.subscribe(self._hear, {"step"})
            self._guarded(self._open)

    def stop(self) -> None:
        """End the window; what it saw is delivered in the background."""
        if self._stop_hearing is not None:
            self._stop_hearing()
            self._stop_hearing = None
        self._guarded(self._end)

    def close(self, patience: float = 30.0) -> None:
        """End the window and wait until what it saw is delivered, at most ``patience`` seconds."""
        self.stop()
        for thread in self._converting:
            thread.join(patience)
        self._converting = []

    def _hear(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        if phase == "begin":
            self._iteration = int(attrs.get("iteration", self._iteration + 1))
            self._steps.append((time.perf_counter_ns(), self._iteration))
            if self._profile is not None and self._first == 0:
                self._first = self._iteration
            elif self._iteration - self._first >= STEPS_AT_ONCE:
                self._guarded(self._end)
                self._guarded(self._open)
                self._first = self._iteration
                self._steps.append((time.perf_counter_ns(), self._iteration))

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - tracing never ends training
            self._profile = None
            if self.failed is None:
                self.failed = f"{type(error).__name__}: {error}"
                logger.warning("no kernels are traced from here on, the rest is: %s", self.failed)

    def _open(self) -> None:
        from torch.profiler import profile

        if self._profile is not None or self.failed is not None:
            return
        self._profile = profile(activities=self._activities())
        self._profile.start()
        self._first = 0
        self._mark()

    def _activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity, supported_activities

        wanted = self._backend.profiler_activity()
        device = None if wanted is None else getattr(ProfilerActivity, wanted, None)
        if wanted is not None and device not in supported_activities():
            if not self._said:
                self._said = True
                logger.warning(
                    "level kernel asks for the kernels of %s, and gets the host's operators: this torch "
                    "cannot profile %s",
                    self._backend.name,
                    wanted,
                )
            device = None
        return [ProfilerActivity.CPU] if device is None else [ProfilerActivity.CPU, device]

    def _mark(self) -> None:
        from torch.profiler import record_function

        for _ in range(_MARKERS):
            before = time.perf_counter_ns()
            with record_function(_MARKER):
                pass
            self._marks.append((before, time.perf_counter_ns()))

    def _end(self) -> None:
        if self._profile is None:
            return
        self._mark()
        profile, self._profile = self._profile, None
        marks, self._marks = self._marks, []
        steps, self._steps = self._steps, []
        profile.stop()
        thread = RankThread(
            target=lambda: self._guarded(lambda: self._convert(profile, marks, steps)),
            name="scan-kernels",
            daemon=True,
        )
        self._converting = [each for each in self._converting if each.is_alive()] + [thread]
        thread.start()

    def _convert(self, profile: Any, marks: list[tuple[int, int]], steps: list[tuple[int, int]]) -> None:
        found = profile.profiler.kineto_results.events()
        markers = sorted(
            (each.start_ns(), each.start_ns() + each.duration_ns())
            for each in found
            if each.name() == _MARKER and each.device_type().name == "CPU"
        )
        offset, uncertainty = clock_offset(markers, marks)
        with_device = any(_on_device(each) for each in found)
        rows: list[tuple[int, int, int, int]] = []
        threads: dict[int, int] = {}
        count = 0

        def deliver() -> None:
            self._deliver(kernel_spans(rows, steps, on_device=with_device))

        for number, each in enumerate(found):
            # The training thread wants the interpreter's lock.
            if number % _AT_ONCE == 0:
                time.sleep(_REST_SECONDS)
            if each.name() == _MARKER or _on_device(each) != with_device:
                continue
            thread = threads.setdefault(each.device_resource_id(), min(len(threads), 255))
            begin = each.start_ns() + offset
            rows.append((begin, begin + each.duration_ns(), self._string(each.name()), thread))
            if len(rows) >= 10_000:
                deliver()
                count += len(rows)
                rows = []
        if rows:
            deliver()
        self._note(
            what="kernels",
            spans=count + len(rows),
            on_device=with_device,
            uncertainty_ns=uncertainty,
        )


def clock_offset(markers: list[tuple[int, int]], marks: list[tuple[int, int]]) -> tuple[int, int]:
    """What to add to the profiler's nanoseconds to get the host's, and how far off that may be.

    ``markers`` are begin and end by the profiler's clock, ``marks`` the readings of the host's clock
    around each, in the same order; the tightest pair decides. Raises ``ValueError`` when they do not
    belong together.
    """
    if not marks or len(markers) != len(marks):
        raise ValueError(f"found {len(markers)} markers in the profile, expected {len(marks)}")
    best: tuple[int, int] | None = None
    for (begin, end), (before, after) in zip(markers, marks, strict=True):
        # The marker lies within the readings: the offset is between these two.
        least, most = before - begin, after - end
        half = abs(most - least) // 2 + 1
        if best is None or half < best[1]:
            best = ((least + most) // 2, half)
    assert best is not None
    return best


def kernel_spans(
    rows: Iterable[tuple[int, int, int, int]], steps: Sequence[tuple[int, int]], *, on_device: bool
) -> NDArray[np.void]:
    """``(begin, end, name's number, thread)`` as spans (n,); on the device both times are the device's.

    ``steps`` are begin and iteration of the steps, in their order; what was before the first is of no step.
    """
    table = np.array(list(rows), dtype=np.int64).reshape(-1, 4)
    spans = np.zeros(len(table), dtype=SPAN)
    spans["begin"], spans["end"] = table[:, 0], table[:, 1]
    if on_device:
        spans["device_begin"], spans["device_end"] = table[:, 0], table[:, 1]
    spans["name"], spans["thread"], spans["kind"] = table[:, 2], table[:, 3], KIND["kernel"]
    begins = np.array([begin for begin, _ in steps], dtype=np.int64)
    numbers = np.array([0, *(iteration for _, iteration in steps)], dtype=np.int32)
    spans["iteration"] = numbers[np.searchsorted(begins, spans["begin"], side="right")]
    for name in ("bytes", "seq", "peer", "microbatch", "chunk"):
        spans[name] = -1
    return spans


def _on_device(event: Any) -> bool:
    return bool(event.device_type().name != "CPU")
