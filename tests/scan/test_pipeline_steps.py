"""Pipelines read from traces: simulated ones of the trace simulator, and one of a V schedule made by hand."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.errors import ScanError
from mt_megatron.pipeline.actions import Action, Kind, Placement, Style
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.simulate.costs import Costs, Link
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.scan.analysis.pipeline_steps import ASSUMED_WEIGHT_SHARE, measured_pipelines, slowest
from mt_megatron.scan.analysis.trace import open_trace
from mt_megatron.scan.format.records import ASYNC, KIND, SPAN, WAIT
from mt_megatron.scan.format.run_files import run_files, segment_path, write_run
from mt_megatron.scan.format.segments import Group, SegmentWriter
from tests.pipeline import by_events
from tools.scan_simulator import Job, parse_fault, parse_layout, simulate


@pytest.mark.parametrize(
    ("layout", "fault", "name"),
    [
        ("pp=4", None, "1f1b"),
        ("pp=4,vpp=2", None, "interleaved"),
        ("dp=2,pp=2,tp=2", "slow_compute:rank=4,factor=1.4", "1f1b"),
        ("pp=4", "slow_link:ranks=1-2,bandwidth=0.05", "1f1b"),
    ],
)
def test_a_traced_step_is_simulated_again(layout: str, fault: str | None, name: str, tmp_path: Path) -> None:
    """The trace simulator has engine, noise and hosts of its own; only the order of calls is shared."""
    faults = [parse_fault(fault)] if fault else []
    simulate(tmp_path, Job(layout=parse_layout(layout), steps=8, microbatches=8), faults, seed=5)
    pipelines = measured_pipelines(open_trace(tmp_path))
    for found in pipelines:
        assert (found.schedule.name, found.calls, found.steps) == (name, "blocking", 6)
        assert found.seconds(found.program()) == pytest.approx(found.pipeline_seconds, rel=0.03)
        assert found.pipeline_seconds < found.step_seconds
        assert not found.weight_measured
        assert np.allclose(found.costs.weight, ASSUMED_WEIGHT_SHARE * np.asarray(found.costs.backward))
    found = slowest(pipelines)
    forward = np.ravel(found.costs.forward)
    if fault and fault.startswith("slow_compute"):
        assert 4 in found.ranks
        assert forward[found.ranks.index(4)] > 1.25 * forward[1 - found.ranks.index(4)]
    if fault and fault.startswith("slow_link"):
        lost = found.program().edge_costs(found.costs)
        assert set(sorted(lost, key=lost.__getitem__)[-2:]) == {(1, 2), (2, 1)}


def test_a_run_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    simulate(tmp_path, Job(layout=parse_layout("dp=2"), steps=3, microbatches=2), [], seed=1)
    with pytest.raises(ScanError, match="no pipeline of several ranks"):
        measured_pipelines(open_trace(tmp_path))


STRINGS = ("", "send", "recv")
DELAY = 0.015


def _write_asynchronous(run: Path, name: str, ranks: int, microbatches: int, steps: int) -> Costs:
    """A trace of a schedule whose sends go on alone; times of its computations by the other simulator."""
    schedule = generate(name, ranks=ranks, microbatches=microbatches)
    placement, rng = schedule.placement, random.Random(1)
    stages = placement.stages
    costs = Costs(
        forward=[rng.uniform(0.010, 0.012) for _ in range(stages)],
        backward=[rng.uniform(0.022, 0.024) for _ in range(stages)],
        weight=[rng.uniform(0.009, 0.011) for _ in range(stages)],
        message=1000.0,
        link=Link(latency=DELAY),
    )
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for step in range(1, steps + 1):
        origin = 1_000_000_000 * step
        times = by_events.simulate(schedule, costs)

        def at(seconds: float, origin: int = origin) -> int:
            return origin + round(seconds * 1e9)

        def span(rank: int, kind: str, begin: float, end: float, step: int = step, **more: Any) -> None:
            row = {"kind": KIND[kind], "begin": at(begin), "end": at(end), "iteration": step}
            rows[rank].append(
                {**row, "bytes": -1, "seq": -1, "peer": -1, "microbatch": -1, "chunk": -1, **more}
            )

        numbers: dict[Action, int] = {}
        for rank, actions in enumerate(schedule.ranks):
            for action in actions:
                other = action.stage + {Kind.F: 1, Kind.B: -1, Kind.W: 0}[action.kind]
                if other == action.stage or not 0 <= other < stages or placement.rank(other) == rank:
                    continue
                to, end = placement.rank(other), times[action][1]
                numbers[action._replace(stage=other)] = counts[rank, to]
                more = {"seq": counts[rank, to], "peer": to, "bytes": 1000, "name": 1}
                span(rank, "p2p", end, end + 1e-6, **more)
                counts[rank, to] += 1
        for rank, actions in enumerate(schedule.ranks):
            free = 0.0
            for action in actions:
                begin, end = times[action]
                where = {"microbatch": action.microbatch, "chunk": placement.chunk(action.stage)}
                if action in numbers:
                    source = placement.rank(action.stage + (-1 if action.kind is Kind.F else 1))
                    more = {"seq": numbers[action], "peer": source, "name": 2}
                    span(rank, "p2p", 0.0, 1e-6, flags=ASYNC, **more)
                    span(rank, "p2p", free, begin, flags=WAIT, **more)
                span(rank, "forward" if action.kind is Kind.F else "backward", begin, end, **where)
                free = end
            span(rank, "step", -0.001, max(end for _, end in times.values()) + 0.002)
    files = run_files(run)
    places = [{"rank": rank, "host": "one", "pp": rank} for rank in range(ranks)]
    write_run(files, {"world_size": ranks, "layout": {"pp": ranks}, "ranks": places})
    for rank in range(ranks):
        folder = files.rank_folder(rank)
        folder.mkdir(mode=0o700)
        spans = np.zeros(len(rows[rank]), dtype=SPAN)
        for index, row in enumerate(rows[rank]):
            for key, value in row.items():
                spans[index][key] = value
        meta = {"rank": rank, "host": "one", "pid": rank, "boot_id": "b", "clock": "monotonic", "session": 0}
        writer = SegmentWriter(segment_path(folder, 0), rank, meta)
        writer.strings(list(STRINGS))
        writer.groups({1: Group(name="pp", ranks=tuple(range(ranks)))})
        writer.spans(spans)
        writer.close()
    return costs


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "zb_h1"])
def test_split_backwards_in_a_v_are_recognised(name: str, tmp_path: Path) -> None:
    costs = _write_asynchronous(tmp_path, name, ranks=2, microbatches=6, steps=4)
    (found,) = measured_pipelines(open_trace(tmp_path))
    style = Style.LOOP if name == "zb_h1" else Style.V
    assert found.schedule.placement == Placement(2, 1 if name == "zb_h1" else 2, style)
    assert (found.schedule.name, found.calls, found.weight_measured) == (name, "asynchronous", True)
    for kind in ("forward", "backward", "weight"):
        expected = getattr(costs, kind)
        assert np.ravel(getattr(found.costs, kind)) == pytest.approx(expected, rel=0.02), kind
    for edge in ((0, 1), (1, 0)):
        assert found.costs.link_of(edge).latency == pytest.approx(DELAY, rel=0.02)
    assert found.seconds(found.program()) == pytest.approx(found.pipeline_seconds, rel=0.02)
    # Without their links the step would be shorter: the agreement is no accident.
    bare = [
        Costs(forward=c.forward, backward=c.backward, weight=c.weight, input=c.input) for c in found.samples
    ]
    assert found.seconds(Program(found.schedule), bare) < 0.95 * found.pipeline_seconds
