"""A trace made of a few events in this process, and readable rows of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mt_megatron.scan.format.records import KINDS
from mt_megatron.scan.format.segments import RankTrace, read_rank
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events

MEMBERS = (0, 1, 2, 3)


def step(iteration: int, inside: Callable[[], None] | None = None) -> None:
    """One step with a micro-batch, in it a layer with a collective, then an optimizer."""
    with events.span("step", iteration=iteration):
        if inside is not None:
            inside()
        with (
            events.span("microbatch", direction="forward", microbatch=0, chunk=1),
            events.span("forward"),
            events.span("layer", number=3),
            events.span("collective", op="all_reduce", group="tp", ranks=MEMBERS, seq=iteration, bytes=64),
        ):
            pass
        with events.span("optimizer", optimizer="AdamW"):
            pass


def record(folder: Path, act: Callable[[Recorder], None], **settings: Any) -> RankTrace:
    """What ``act`` leaves in the trace of a recorder that is open around it."""
    recorder = Recorder(folder, **{"rank": 0, "level": "base", **settings})
    recorder.start()
    try:
        act(recorder)
    finally:
        recorder.close()
    assert recorder.failed is None
    return read_rank(recorder.files.rank_folder(recorder.rank))


def rows(trace: RankTrace, *fields: str) -> list[tuple[Any, ...]]:
    """``kind``, ``name`` and other ``fields`` of every span but pauses, in the order of their begins."""
    found = []
    for span in sorted(trace.spans, key=lambda span: (int(span["begin"]), -int(span["end"]))):
        kind = KINDS[span["kind"]]
        if kind != "pause":
            found.append((kind, trace.strings[span["name"]], *(int(span[field]) for field in fields)))
    return found


def counters(trace: RankTrace) -> dict[str, list[float]]:
    """Values by name, in the order of time."""
    found: dict[str, list[float]] = {}
    for row in trace.counters:
        found.setdefault(trace.strings[row["name"]], []).append(float(row["value"]))
    return found
