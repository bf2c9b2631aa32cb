"""Whether a device's times lie rightly on its host's clock: no work begins before the host asked for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mt_megatron.scan.format.records import OPEN

from .offset_lines import robust_slope

_STRETCHES = 20
TOLERATED_NS = 1_000
"""Events of a device resolve about this."""


@dataclass(frozen=True, kw_only=True)
class AnchorCheck:
    """One rank's device times beside its host's."""

    spans: int
    """Spans with device times."""

    early: int
    """Of those, begun on the device before the host began them, by more than ``TOLERATED_NS``."""

    worst: float
    """ns by which the earliest of them is early; 0 when none is."""

    drift_ppm: float
    """How much faster the device's times run: the trend of the shortest delays between host and device. Real
    queues grow and shrink; the shortest delays of long stretches do not."""

    @property
    def sound(self) -> bool:
        """Whether the times can be used: at most one span in a hundred is early."""
        return self.early <= self.spans / 100


def check_anchors(spans: np.ndarray) -> AnchorCheck | None:
    """Check ``SPAN`` records of one rank; None when none has device times."""
    timed = spans[(spans["device_end"] > 0) & (spans["end"] != OPEN)]
    if not len(timed):
        return None
    delay = timed["device_begin"] - timed["begin"]
    early = delay < -TOLERATED_NS
    order = np.argsort(timed["begin"], kind="stable")
    parts = np.array_split(order, min(_STRETCHES, len(order)))
    x = np.array([float(np.median(timed["begin"][part] - timed["begin"][order[0]])) for part in parts])
    shortest = np.array([float(delay[part].min()) for part in parts])
    return AnchorCheck(
        spans=len(timed),
        early=int(early.sum()),
        worst=float(-delay[early].min()) if early.any() else 0.0,
        drift_ppm=robust_slope(x, shortest) * 1e6 if len(parts) > 2 else 0.0,
    )
