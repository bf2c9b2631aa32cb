"""How long a rank usually goes without an event, and whether it computes now: who is slow has not hung."""

from __future__ import annotations

from statistics import median

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.format.records import OPEN
from mt_megatron.scan.format.segments import RankTrace

_STEPS = 16
_MOST_SPANS = 5_000
_LEAST_NS = 1_000_000_000


class Pace:
    """The longest time without an event in each of the last steps."""

    def __init__(self) -> None:
        self._last = 0
        self._gaps: dict[int, int] = {}

    def feed(self, spans: NDArray[np.void]) -> None:
        """Take in ``records.SPAN``, later ones than before."""
        spans = spans[-_MOST_SPANS:]
        ended = spans[spans["end"] != OPEN]
        times = np.concatenate([spans["begin"], ended["end"]]).astype(np.int64)
        steps = np.concatenate([spans["iteration"], ended["iteration"]])
        order = np.argsort(times, kind="stable")
        order = order[times[order] > self._last]
        if not len(order):
            return
        times, steps = times[order], steps[order]
        gaps = np.diff(times, prepend=self._last or times[0])
        for step in np.unique(steps).tolist():
            self._gaps[step] = max(self._gaps.get(step, 0), int(gaps[steps == step].max()))
        self._last = int(times[-1])
        for step in sorted(self._gaps)[: -_STEPS - 1]:
            del self._gaps[step]

    @property
    def usual_ns(self) -> int:
        """The median over the last steps but the newest; 0 where there is none."""
        gaps = [self._gaps[step] for step in sorted(self._gaps)[:-1]]
        return int(median(gaps)) if gaps else 0


def processors_used(trace: RankTrace, since: int) -> float:
    """How many processors the rank has used from ``since`` (ns of its clock) on; NaN where that is not known,
    or for less than a second."""
    if "process_cpu_ns" not in trace.strings:
        return float("nan")
    rows = trace.counters[trace.counters["name"] == trace.strings.index("process_cpu_ns")]
    rows = rows[rows["time"] >= since]
    if len(rows) < 2:
        return float("nan")
    first, last = int(np.argmin(rows["time"])), int(np.argmax(rows["time"]))
    length = int(rows["time"][last] - rows["time"][first])
    if length < _LEAST_NS:
        return float("nan")
    return float(rows["value"][last] - rows["value"][first]) / length
