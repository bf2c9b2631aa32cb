"""Alerts: a statistic that leaves its band, the first value that is not finite, experts without tokens.

The band follows each series: logarithms of the last ``WINDOW`` samples, a robust line through them (medians
of both halves), a spread from the median and the 90th percentile of the absolute residuals. A sample
further than ``FLOOR`` and ``WIDTH`` spreads from the line's continuation is outside. Samples outside do not
move the band; after ``ACCEPT`` of them in a row the series has a new level and the window starts again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scope.recording.data import Value
from mt_megatron.scope.recording.writer import Alert
from mt_megatron.scope.watch.requests import EARLY_STEPS

WINDOW = 64
"""Samples that make a band."""

FEWEST = 16
"""Samples before one is judged."""

WIDTH = 9.0
"""Half a band in robust standard deviations; training's noise has heavier tails than normal."""

FLOOR = 0.15
"""Half a band at least, in the logarithm: changes below 15 % are nobody's alarm."""

ACCEPT = 12
"""Samples outside in a row after which their level is the series' new one."""

CALM = 3
"""Samples inside after which a series may alert again."""

DEAD_SAMPLES = 3
"""Samples in a row without a token before an expert counts as dead."""

FAR = 0.9
FAR_DEVIATIONS = 1.645
"""Residual that 90 % do not exceed, in standard deviations of a normal distribution: heavy tails widen the
band where they say more than the median."""

SPREAD_OF_MAD = 1.4826
"""A normal distribution's standard deviation in units of its median absolute deviation."""

BANDED = (
    "activation_rms",
    "activation_max",
    "residual_growth",
    "gradient_norm",
    "weight_norm",
    "update_ratio",
    "attention_logit_max",
    "attention_entropy",
    "router_entropy",
    "expert_load",
    "embedding_norm",
    "outlier_channels",
)
"""Positive statistics that have a band."""

_OF_UPDATES = ("gradient_norm", "update_ratio")
"""No measure for later steps where the step was skipped."""

_NEAR_ZERO = 1e-4
"""Of a series' level: smaller values count as this, so that a zero is far outside but has a logarithm."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """A sample outside its band."""

    value: float
    low: float
    high: float
    widths: float
    """Distance from the band's middle in halves of its width: above 1."""


class Band:
    """Of one series of positive values."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._outside: list[float] = []
        self._inside = CALM
        self._alerted = False

    def take(self, value: float) -> Outside | None:
        """Judge ``value`` and learn from it; the first sample outside is returned, further ones are not until
        the series was inside for ``CALM`` samples. Values that are not finite are left to others."""
        if not math.isfinite(value) or value < 0:
            return None
        middle = math.exp(_median(sorted(self._window))) if self._window else value
        if not max(value, middle) > 0:
            return None
        sample = math.log(max(value, _NEAR_ZERO * middle))
        if len(self._window) < FEWEST:
            self._window.append(sample)
            return None
        center, half = self._line()
        if abs(sample - center) <= half:
            self._window.append(sample)
            self._outside.clear()
            self._inside += 1
            if self._inside >= CALM:
                self._alerted = False
            return None
        self._inside = 0
        self._outside.append(sample)
        first, self._alerted = not self._alerted, True
        if len(self._outside) >= ACCEPT:
            self._window.clear()
            self._window.extend(self._outside)
            self._outside.clear()
            self._alerted = False
        if not first:
            return None
        return Outside(
            value=value,
            low=math.exp(center - half),
            high=math.exp(center + half),
            widths=abs(sample - center) / half,
        )

    def _line(self) -> tuple[float, float]:
        """Where the next sample is expected, and half the band's width."""
        window = list(self._window)
        half = len(window) // 2
        early, late = _median(sorted(window[:half])), _median(sorted(window[-half:]))
        slope = (late - early) / (len(window) - half)
        # Medians of halves lie in their middles.
        start = early - slope * (half - 1) / 2
        residuals = sorted(sample - start - slope * index for index, sample in enumerate(window))
        offset = _median(residuals)
        away = sorted(abs(residual - offset) for residual in residuals)
        spread = max(SPREAD_OF_MAD * _median(away), away[int(FAR * (len(away) - 1))] / FAR_DEVIATIONS)
        return start + offset + slope * len(window), FLOOR + WIDTH * spread


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class AlertModel:
    """Judges a run's steps in ascending order, one session after the other."""

    def __init__(self) -> None:
        self._bands: dict[tuple[str, str], Band] = {}
        self._parts: dict[tuple[str, str], int] = {}
        """Of how many ranks' parts a band's values are made since the start."""

        self._empty: dict[str, NDArray[np.int64]] = {}
        self._dead: dict[str, frozenset[int]] = {}
        self._order: dict[str, int] = {}
        self._not_finite: set[bool] = set()

    def restart(self, *, same_start: bool = False) -> None:
        """Another session begins: its first value that is not finite is told again; bands are kept. Where it
        is of another start, its ranks may share the work otherwise."""
        self._not_finite.clear()
        if not same_start:
            self._parts.clear()

    def modules(self, order: Iterable[str]) -> None:
        """Paths in execution order: of several modules the first is named."""
        self._order = {path: index for index, path in enumerate(order)}

    def step(self, step: int, *, loss: float, grad_norm: float, skipped: bool, known: bool) -> list[Alert]:
        """Alerts of a training step. ``known``: the loss should be there, so that NaN means NaN."""
        found = []
        broken = [("loss", loss)] if known and not math.isfinite(loss) else []
        if math.isinf(grad_norm):  # a NaN is also what a step without a norm has
            broken.append(("grad_norm", grad_norm))
        found += self._first_not_finite(step, [("", name, value) for name, value in broken])
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            outside = self._band("", name).take(value)
            if outside is not None:
                found.append(_banded(step, "", name, outside, others=0))
        return found

    def statistics(self, step: int, values: Iterable[Value], *, skipped: bool = False) -> list[Alert]:
        """Alerts of a step's statistics: at most one of a band for each statistic, about the module that is
        furthest outside. Values that lack parts are left out."""
        left: dict[str, list[tuple[Value, Outside]]] = {}
        broken = []
        found = []
        for each in values:
            if not each.whole:
                continue
            name = each.statistic
            wrong = each.value > 0 if name == "not_finite" else not math.isfinite(each.value)
            # Where fp16 gradients overflow there is no norm of them: a wrong one is of a step that diverged.
            # Of weights that were all zero, as a bias is at first, no share was updated; those that are not
            # finite have a norm.
            if wrong and name != "update_ratio" and (name in BANDED or name == "not_finite"):
                broken.append((each.path, name, each.value))
            # Early steps lie close together and are of the warm-up: no measure for what is an interval apart.
            if name in BANDED and step not in EARLY_STEPS and not (skipped and name in _OF_UPDATES):
                of = self._parts.setdefault((each.path, name), each.of)
                if each.of < of:
                    continue  # ranks have not announced themselves again after a rewind
                if each.of > of:
                    # A node came late: sums of fewer ranks are no measure for those of all.
                    self._parts[each.path, name] = each.of
                    self._bands.pop((each.path, name), None)
                outside = self._band(each.path, name).take(each.value)
                if outside is not None:
                    left.setdefault(name, []).append((each, outside))
            if name == "expert_load" and each.vector is not None:
                found += self._experts(step, each.path, each.vector)
        found = self._first_not_finite(step, broken) + found
        for name, pairs in left.items():
            worst, outside = max(pairs, key=lambda pair: pair[1].widths)
            found.append(_banded(step, worst.path, name, outside, others=len(pairs) - 1))
        return found

    def _band(self, path: str, name: str) -> Band:
        return self._bands.setdefault((path, name), Band())

    def _first_not_finite(self, step: int, broken: list[tuple[str, str, float]]) -> list[Alert]:
        """Told once, and once more where a module can be named and only the run's loss was before."""
        if not broken or True in self._not_finite:
            return []
        last = len(self._order)
        path, name, value = min(broken, key=lambda each: (not each[0], self._order.get(each[0], last)))
        if bool(path) in self._not_finite:
            return []
        self._not_finite.add(bool(path))
        where = path or "the run"
        more = f"; {len(broken) - 1} more" if len(broken) > 1 else ""
        return [
            Alert(
                step=step,
                kind="not finite",
                path=path,
                statistic=name,
                value=value,
                low=math.nan,
                high=math.nan,
                text=f"first value that is not finite: {name} of {where} is {value:g}{more}",
            )
        ]

    def _experts(self, step: int, path: str, tokens: NDArray[np.float64]) -> list[Alert]:
        empty = self._empty.get(path)
        if empty is None or len(empty) != len(tokens):
            empty = np.zeros(len(tokens), np.int64)
        if not tokens.sum() > 0:
            return []
        empty = np.where(tokens == 0, empty + 1, 0)
        self._empty[path] = empty
        dead = frozenset(int(each) for each in np.flatnonzero(empty >= DEAD_SAMPLES))
        new = dead - self._dead.get(path, frozenset())
        self._dead[path] = dead
        if not new:
            return []
        named = ", ".join(map(str, sorted(new)[:8])) + (" ..." if len(new) > 8 else "")
        return [
            Alert(
                step=step,
                kind="dead experts",
                path=path,
                statistic="dead_experts",
                value=float(len(dead)),
                low=0.0,
                high=0.0,
                text=f"experts without a token in {DEAD_SAMPLES} samples in a row at {path}: {named} "
                f"({len(dead)} of {len(tokens)} now)",
            )
        ]


def _banded(step: int, path: str, name: str, outside: Outside, *, others: int) -> Alert:
    of = f" of {path}" if path else ""
    more = f"; {others} more module{'s leave' if others > 1 else ' leaves'} theirs" if others else ""
    return Alert(
        step=step,
        kind="band",
        path=path,
        statistic=name,
        value=outside.value,
        low=outside.low,
        high=outside.high,
        text=f"{name}{of} is {outside.value:.4g}; its band is {outside.low:.4g} to {outside.high:.4g}{more}",
    )


def as_map(alert: Alert, session: int) -> Mapping[str, object]:
    """For JSON: NaN and infinite numbers as None or text."""

    def plain(value: float) -> float | str | None:
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else str(value)

    return {
        "step": alert.step,
        "session": session,
        "time_ns": alert.time_ns,
        "kind": alert.kind,
        "path": alert.path,
        "statistic": alert.statistic,
        "value": plain(alert.value),
        "low": plain(alert.low),
        "high": plain(alert.high),
        "text": alert.text,
    }
