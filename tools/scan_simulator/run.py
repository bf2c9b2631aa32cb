"""Makes a whole simulated run: the trace's files, and the truth about it in a file elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.errors import ConfigError
from mt_megatron.scan.format.run_files import run_files

from .clocks import Wander
from .columns import columns_of
from .engine import Engine
from .faults import Fault
from .job import Job
from .rank_files import RankFiles
from .schedule import plan
from .work import pieces


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is true of a simulated run and its trace does not say."""

    simulated: bool
    seed: int
    steps: int
    events: int
    """Spans of all ranks, without pauses and checkpoints."""

    layout: dict[str, Any]
    faults: list[dict[str, Any]]
    step_seconds: list[float]
    clocks: dict[str, dict[str, float]]
    """Machine -> offset (ns) and drift (parts per million) of its clock."""


def simulate(
    out: Path,
    job: Job,
    faults: Sequence[Fault] = (),
    *,
    seed: int = 0,
    wander: Wander | None = None,
    progress: Callable[[int], None] | None = None,
) -> Truth:
    """Write the trace of ``job`` with ``faults`` into the run's folder ``out``.

    Equal arguments make equal files. Everything drawn for one purpose is the same with and without faults.
    ``progress`` is called after each step. Raises ``ConfigError`` for impossible faults and ``ScanError``
    when ``out`` holds a trace.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed {seed}; expected a whole number from 0 on")
    engine = Engine(job, faults, seed)
    files = RankFiles(run_files(out), engine, wander or Wander())
    seconds = []
    began = float(engine.now.min())
    step = None
    for number in range(1, job.steps + 1):
        step = engine.step()
        files.add(step, engine.queue_depth(), [fault for fault in faults if fault.on(number)])
        over = float(step.over.max())
        seconds.append((over - began) / 1e9 if np.isfinite(over) else float("inf"))
        began = over
        if progress is not None:
            progress(number)
        # One that hangs after its last exchange of a step keeps the others waiting in the next one.
        if not np.isfinite(step.over).any():
            break
    assert step is not None
    files.close(step)
    layout = job.layout
    return Truth(
        simulated=True,
        seed=seed,
        steps=len(seconds),
        events=files.events * len(seconds),
        layout=asdict(layout),
        faults=[fault.truth(layout) for fault in faults],
        step_seconds=[each for each in seconds if np.isfinite(each)],
        clocks={
            layout.host_name(host): {
                "offset_ns": float(files.clocks.offset[host]),
                "drift_ppm": float(files.clocks.drift[host] * 1e6),
            }
            for host in range(layout.hosts)
        },
    )


def write_truth(path: Path, out: Path, truth: Truth) -> None:
    """Write ``truth`` as JSON. Raises ``ConfigError`` where a detector that reads ``out`` could see it."""
    if path.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{path} lies within {out}; keep the truth out of the folder that is diagnosed")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(truth), indent=1) + "\n", encoding="utf-8")


def with_events(job: Job, events_per_step: int) -> Job:
    """``job`` with as many layers as give each rank about ``events_per_step`` spans a step; without any
    collective in a layer, as many micro-batches."""
    layout = job.layout
    by_layers = max(layout.tp, layout.cp, layout.ep) > 1

    def sized(count: int) -> Job:
        if by_layers:
            return replace(job, layers=count)
        return replace(job, microbatches=count * (layout.pp if layout.vpp > 1 else 1))

    few, more = _spans(sized(1)), _spans(sized(2))
    return sized(max(1, 1 + round((events_per_step - few) / (more - few))))


def _spans(job: Job) -> float:
    made = plan(job.layout.pp, job.microbatches, job.layout.vpp)
    template = columns_of(job, made, pieces(job, "forward"), pieces(job, "backward"))
    return float(template.valid.sum()) / job.layout.pp
