"""One result of the device run: a name, how it ended, and its figures."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one check found."""

    section: str
    name: str
    outcome: Outcome
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Why it was skipped, or the end of the traceback."""


class Unsupported(Exception):
    """The device does not have what a check is about; the check counts as skipped, with this text."""


def checked(section: str, name: str, check: Callable[[], dict[str, Any]]) -> Result:
    """Run ``check``, which returns its figures and raises when something is wrong."""
    started = time.monotonic()
    outcome: Outcome = "passed"
    figures: dict[str, Any] = {}
    reason = ""
    try:
        figures = check()
    except Unsupported as why:
        outcome, reason = "skipped", str(why)
    except Exception:  # noqa: BLE001 - reported, and the other checks go on
        outcome, reason = "failed", traceback.format_exc()[-4000:]
    return Result(
        section=section,
        name=name,
        outcome=outcome,
        seconds=round(time.monotonic() - started, 2),
        figures=figures,
        reason=reason,
    )
