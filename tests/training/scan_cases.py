"""The ranks' side of the tests of tracing in the training loop."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.config.parse import load_config
from mt_megatron.scan.format.segments import read_rank, sessions
from mt_megatron.seams import events
from mt_megatron.training import scan_session
from mt_megatron.training.loop import Outcome, train
from mt_megatron.training.validate import validate
from tests.training.loop_cases import MODEL, TRAINING, start


def traced(flags: str) -> tuple[dict[str, Any], Outcome]:
    """One run: its lines, what was left in the process during and after it."""
    lines, during = io.StringIO(), set[str]()
    original = scan_session.Tracing.start

    def started(self: scan_session.Tracing) -> None:
        original(self)
        during.update(_threads())

    scan_session.Tracing.start = started  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(lines):
            config = load_config(f"{MODEL} {TRAINING} --scope off {flags}".split())
            validate(config, world_size=dist.get_world_size())
            outcome = train(config)
    finally:
        scan_session.Tracing.start = original  # type: ignore[method-assign]
    return {
        "lines": lines.getvalue().splitlines(),
        "during": sorted(during),
        "after": sorted(_threads()),
        "listening": events.listening(),
        "iteration": outcome.progress.iteration,
        "finished": outcome.finished,
        "straggler": outcome.straggler,
        "checkpoint": None if outcome.checkpoint is None else outcome.checkpoint.name,
    }, outcome


def runs(folder: str) -> dict[str, Any]:
    """Two ranks: traced by default, not at all, nowhere, in spite of a disk, and ended by a straggler."""
    start()
    found = {
        "default": traced(f"--save {folder}/default --train-iters 4")[0],
        "again": traced(f"--save {folder}/default --train-iters 6 --scan full")[0],
        "off": traced(f"--save {folder}/off --train-iters 2 --scan off")[0],
        "nowhere": traced("--train-iters 2")[0],
        "elsewhere": traced(f"--train-iters 2 --scan-dir {folder}/there --scan-window 2:1:full")[0],
    }
    if dist.get_rank() == 0:
        (Path(folder) / "blocked").mkdir()
        (Path(folder) / "blocked" / "scan").write_text("in the way")
    dist.barrier()
    found["blocked"] = traced(f"--save {folder}/blocked --train-iters 2")[0]
    found["straggler"] = _leaving(folder)
    dist.barrier()
    rank = dist.get_rank()
    for name, path in (("default", f"{folder}/default"), ("elsewhere", f"{folder}/there")):
        found[f"{name}_trace"] = _trace(Path(path) / "scan" / f"rank-{rank:05d}")
    return found


def _leaving(folder: str) -> dict[str, Any]:
    """Rank 0 wants to measure before the second step and to leave before the fourth."""
    asked: list[str] = []
    steps = {"count": 0}
    original = {name: getattr(scan_session.Tracing, name) for name in ("wants_to_leave", "measure")}

    def wants(self: scan_session.Tracing) -> bool:
        steps["count"] += 1
        return dist.get_rank() == 0 and steps["count"] == 4

    def measure(self: scan_session.Tracing) -> None:
        asked.append(f"after step {steps['count']}")
        original["measure"](self)

    scan_session.Tracing.wants_to_leave = property(wants)  # type: ignore[assignment,method-assign]
    scan_session.Tracing.measure = measure  # type: ignore[method-assign]
    before = scan_session.Tracing.wants_measurement
    scan_session.Tracing.wants_measurement = property(  # type: ignore[assignment,method-assign]
        lambda self: dist.get_rank() == 1 and steps["count"] == 2
    )
    try:
        found = traced(f"--save {folder}/straggler")[0]
    finally:
        scan_session.Tracing.wants_measurement = before  # type: ignore[method-assign]
        for name, value in original.items():
            setattr(scan_session.Tracing, name, value)
    return {**found, "measured": asked}


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("scan-")}


def _trace(folder: Path) -> dict[str, Any]:
    trace = read_rank(folder)
    return {
        "meta": trace.meta,
        "session": trace.meta["session"],
        "iterations": sorted({int(number) for number in trace.spans["iteration"]}),
        "kinds": sorted({int(kind) for kind in trace.spans["kind"]}),
        "peers": sorted(
            {
                int(peer)
                for number in sessions(folder)
                for peer in read_rank(folder, session=number).pings["peer"]
            }
        ),
    }
