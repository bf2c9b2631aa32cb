"""The one launch of fake ranks per test session, for the tests of this folder and the coverage gate."""

from __future__ import annotations

import functools
from typing import Any

from tests.fake_cuda.layouts import FACTORS, covering
from tests.fake_cuda.pairwise import Row
from tests.launch import run_ranks

PROCESSES = 2
PLAIN = {name: values[0] for name, values in FACTORS.items()}
CONTROLS: tuple[Row, ...] = ({**PLAIN, "pp": 2}, {**PLAIN, "build": "megatron", "tp": 2})
"""Two small layouts that run once as they are and once for each planted tensor."""


@functools.cache
def outcomes() -> list[dict[str, Any]]:
    """All ranks of all jobs, with and without a planted tensor (see ``forward.run``)."""
    jobs: list[tuple[Row, str | None]] = [(row, None) for row in (*covering(), *CONTROLS)]
    jobs += [(row, device) for row in CONTROLS for device in ("cpu", "cuda:0")]
    shares = run_ranks(PROCESSES, "tests.fake_cuda.forward:run_share", jobs, timeout=400)
    return [outcome for share in shares for outcome in share]


def records() -> dict[str, set[str]]:
    """Name of a rank's run -> keys of the touch points it executed; failed and planted runs left out."""
    found = {
        f"fake_cuda.row_{covering().index(outcome['row'])}_{outcome['stage']}_stage": set(outcome["points"])
        for outcome in outcomes()
        if outcome["plant"] is None and outcome["error"] is None and outcome["row"] in covering()
    }
    # Both processes import the same modules, which the runs that follow depend on.
    return found | {"fake_cuda.imports": set(outcomes()[0]["imported"])}


def patches() -> set[str]:
    """Ids of the patches that ``patch("cuda")`` had applied."""
    return set(outcomes()[0]["patches"])
