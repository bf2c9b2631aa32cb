"""How long the ranks of a run wait for a processor when nothing is wrong: a culprit stands out from that."""

from __future__ import annotations

import numpy as np

from mt_megatron.scan.analysis.robust import lower_median
from mt_megatron.scan.analysis.step_table import StepTable

FEWEST_BEFORE = 4
"""Steps outside a stretch that say what was usual."""


def usual_wait(table: StepTable, first_step: int, last_step: int) -> float:
    """ns a step that the run's ranks wait for a processor outside these steps, or that the middle one of them
    does in them, whichever is more. Less than this comes and goes on such a machine without a fault."""
    waited = table.columns["run_queue_wait_ns"]
    inside = (table.iteration >= first_step) & (table.iteration <= last_step)
    found = [0.0]
    before = waited[:, ~inside][np.isfinite(waited[:, ~inside])]
    if len(before) >= FEWEST_BEFORE * len(table.ranks):
        found.append(float(np.median(before)))
    meanwhile = [np.nanmean(row) for row in waited[:, inside] if np.isfinite(row).any()]
    if len(meanwhile) > 2:
        found.append(float(lower_median(np.array(meanwhile))))
    return max(found)
