"""Name of the data -> the function that makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import model_data, run_data, tensors, timeline, tokens, topology
from .context import Answer, Context

DATA: Mapping[str, Callable[[Context, dict[str, Any]], Answer]] = {
    "run": run_data.run,
    "steps": run_data.steps,
    "series": run_data.series,
    "vectors": run_data.vectors,
    "alerts": run_data.alerts,
    "model": model_data.model,
    "parted": model_data.parted,
    "experts": model_data.experts,
    "tensors": tensors.tensors,
    "tile": tensors.tile,
    "thumbs": tensors.thumbs,
    "summary": tensors.summary,
    "projection": tensors.projection,
    "rows": tokens.rows,
    "tokens": tokens.tokens,
    "topology": topology.topology,
    "timeline": timeline.timeline,
    "timeline_steps": timeline.timeline_steps,
}
