"""What the ranks of the executor's tests run; each function returns JSON-able results."""

from __future__ import annotations

from typing import Any

from tests.pipeline.execute import small_models


def same_as_upstream(pp: int, cases: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Per case and schedule what differs from upstream's schedule, by name of the gradient or statistic."""
    found: dict[str, list[str]] = {}
    for case in cases:
        found.update(_case(pp, **case))
    return found


def _case(
    pp: int,
    *,
    model: str,
    schedules: list[str],
    chunks: int = 1,
    microbatches: int = 4,
    **options: Any,
) -> dict[str, list[str]]:
    from mt_megatron.pipeline.execute.source import set_pipeline_schedule
    from mt_megatron.pipeline.generate.catalogue import generate

    small_models.start(pp, vpp=chunks if chunks > 1 else None)
    pipeline = small_models.Pipeline(model, layers=pp * chunks, **options)
    set_pipeline_schedule(None)
    expected = pipeline.digests(pipeline.step(microbatches))
    found = {}
    for name in schedules:
        set_pipeline_schedule(generate(name, ranks=pp, chunks=chunks, microbatches=microbatches))
        got = pipeline.digests(pipeline.step(microbatches))
        label = f"{model} {name} x{chunks} m{microbatches} {options or ''}".strip()
        assert got.keys() == expected.keys() and len(got) > 5
        found[label] = [key for key in expected if got[key] != expected[key]]
    set_pipeline_schedule(None)
    return found
