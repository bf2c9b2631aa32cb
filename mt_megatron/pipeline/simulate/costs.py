"""Times, bytes and links of one training step: what the simulator is given besides a schedule.

Times are in seconds, sizes in bytes. Every quantity of a stage is one number for all stages, an array
[stages], or an array [stages, micro-batches] (packed or uneven micro-batches).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError

Floats = npt.NDArray[np.float64]
PerStage = float | Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[Any]
"""One number, [stages], or [stages, micro-batches]."""

Edge = tuple[int, int]
"""Sending rank and receiving rank."""


@dataclass(frozen=True)
class Link:
    """One direction between two ranks. Transfers on it run one after another, each for ``bytes /
    bandwidth``, and arrive ``latency`` later; both directions are independent."""

    latency: float = 0.0
    """Seconds from the last byte sent to the last byte received."""

    bandwidth: float = math.inf
    """Bytes per second."""

    window: int | None = None
    """Transfers in flight at most: a further one begins when the oldest has arrived. None: no limit."""

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0) or math.isinf(self.latency):
            raise ConfigError(
                f"found a link with a latency of {self.latency} s and {self.bandwidth} bytes/s; expected a "
                "finite latency of at least 0 and a bandwidth above 0"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"found a window of {self.window} transfers; expected at least 1, or None for no limit"
            )


PERFECT = Link()
"""No latency, no limit of bandwidth."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of the computations, transfers and reductions of one step."""

    forward: PerStage = 1.0
    """Seconds of an F."""

    backward: PerStage = 2.0
    """Seconds of a whole backward: gradients of input and weights."""

    weight: PerStage | None = None
    """Seconds of a W, the part of the backward that a schedule may defer. Needed by schedules with W."""

    input: PerStage | None = None
    """Seconds of a B whose weight gradients a W computes. None: ``backward - weight``."""

    message: PerStage = 0.0
    """Bytes of a stage's output, which are those of the gradient that comes back for it."""

    link: Link = PERFECT
    """Every link that ``links`` does not name."""

    links: Mapping[Edge, Link] = field(default_factory=dict)
    """By sending and receiving rank."""

    reduction: PerStage = 0.0
    """Seconds of the data-parallel reduction of a stage's gradients, [stages] at most. Those of one rank
    run one after another, beside computations and transfers."""

    activation: PerStage = 1.0
    """Bytes that a stage keeps from the F to the B (or W) of a micro-batch."""

    weight_share: float = 1.0
    """Part of ``activation`` that is kept from B to W where the backward is split."""

    static: PerStage = 0.0
    """Bytes of a stage's weights, gradients and optimizer state, [stages] at most."""

    def link_of(self, edge: Edge) -> Link:
        return self.links.get(edge, self.link)


def per_stage(value: PerStage, stages: int, microbatches: int, name: str) -> Floats:
    """``value`` as [stages, micro-batches], finite and not negative. Raises ConfigError."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, None]
    try:
        made = np.broadcast_to(array, (stages, microbatches))
    except ValueError:
        raise ConfigError(
            f"found {name} of shape {np.shape(value)}; expected one number, [{stages}] (stages) or "
            f"[{stages}, {microbatches}] (stages, micro-batches)"
        ) from None
    if not (array.min(initial=0.0) >= 0.0 and array.max(initial=0.0) < math.inf):
        raise ConfigError(f"found {name} of {value}; expected finite numbers of at least 0")
    return made
