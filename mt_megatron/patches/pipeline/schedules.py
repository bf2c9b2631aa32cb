"""Whoever asks Megatron-Core for a schedule gets the one that ``set_pipeline_schedule`` chose."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patches.model.fp8 import in_fp8_step
from mt_megatron.patching.spec import Patch


def _get_forward_backward_func(original: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    upstream = original()
    source = sys.modules.get("mt_megatron.pipeline.execute.source")
    # Nobody can have chosen a schedule without importing it.
    if source is None or not source.takes_over():
        return upstream
    return partial(in_fp8_step, partial(source.forward_backward, upstream))


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="pipeline.schedule",
            target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            kind="wrap",
            feature="pipeline",
            reason="it knows 1F1B and interleaved 1F1B alone; without a chosen schedule it answers as before",
            body=_get_forward_backward_func,
            digest="821ba5e9d88d38b49d4dec08c9f75fe77b3811de48678917a2f14df8a4794230",
        )
    ]
