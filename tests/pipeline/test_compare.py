"""Schedules side by side, what they demand of links, a lost rank, and pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Placement
from mt_megatron.pipeline.compare import compare, typical, with_chunks
from mt_megatron.pipeline.draw import seconds, svg, text
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.simulate.costs import Costs, Link
from mt_megatron.pipeline.simulate.demands import TOLERANCE, demands
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.pipeline.simulate.rerouted import rerouted_makespan


def test_cutting_a_model_anew_keeps_its_time() -> None:
    costs = Costs(forward=[1.0, 2.0, 3.0, 6.0], backward=2.0, weight=1.0, activation=[4.0, 4.0, 4.0, 8.0])
    two = with_chunks(costs, Placement(4), 2)
    assert np.ravel(two.forward).tolist() == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 3.0, 3.0]
    assert np.ravel(two.backward).tolist() == [1.0] * 8
    assert np.sum(two.activation) == 20.0
    back = with_chunks(two, Placement(4, 2), 1)
    assert np.ravel(back.forward).tolist() == costs.forward
    third = with_chunks(costs, Placement(4), 3)
    assert np.sum(third.forward) == pytest.approx(12.0) and np.shape(third.forward) == (12, 1)
    by_batch = replace(costs, forward=np.arange(8.0).reshape(4, 2))
    assert np.asarray(with_chunks(by_batch, Placement(4), 2).forward).sum(axis=0).tolist() == [12.0, 16.0]
    assert with_chunks(costs, Placement(4), 1) is costs


def test_every_schedule_has_a_row() -> None:
    costs = Costs(forward=1.0, backward=2.0, weight=1.0, message=1.0, link=Link(0.05, 100.0))
    mine = generate("hybrid", ranks=4, chunks=2, microbatches=16, group=5)
    rows = {row.name: row for row in compare([costs], Placement(4), 16, schedules=[mine], replicas=3)}
    assert {"1f1b, blocking", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev", "hybrid"} <= set(rows)
    assert rows["1f1b, blocking"].against == 1.0 and rows["1f1b"].against < 1.0
    assert rows["1f1b"].seconds == Program(generate("1f1b", ranks=4, microbatches=16)).makespan(costs)
    assert rows["zbv"].seconds < rows["zb_h1"].seconds < rows["1f1b"].seconds
    assert rows["depth_first"].activations == 4.0 and rows["breadth_first"].activations == 16.0
    assert rows["memory_capped:6"].activations <= 6.0
    lost = rows["a rank of 3 pipelines lost, re-routed, W apart"]
    assert 1.0 < lost.against < rows["its whole pipeline of 3 dropped"].against
    assert all(row.bytes == 0.0 for row in rows.values())
    # Sizes that a schedule cannot have leave its row out: DualPipeV needs 8 micro-batches here.
    few = compare([replace(costs, weight=None)], Placement(4), 5)
    assert {row.name for row in few} >= {"1f1b"} and not {"zb_h1", "dualpipev", "interleaved"} & {
        row.name for row in few
    }


def test_the_typical_step_is_the_median() -> None:
    program = Program(generate("1f1b", ranks=2, microbatches=4))
    samples = [Costs(forward=value) for value in (5.0, 1.0, 3.0)]
    assert typical(program, samples) is samples[2]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "breadth_first"])
def test_demands_are_where_a_step_grows_by_the_tolerance(name: str) -> None:
    chunks = 1 if name == "1f1b" else 2
    program = Program(generate(name, ranks=4, chunks=chunks, microbatches=8))
    costs = Costs(forward=1.0 / chunks, backward=2.0 / chunks, message=50.0, link=Link(9.0, 1.0))
    found, limit = demands(program, costs), program.makespan(replace(costs, link=Link())) * (1 + TOLERANCE)
    for link, slower in (
        (Link(bandwidth=found.bandwidth), Link(bandwidth=0.98 * found.bandwidth)),
        (Link(latency=found.latency), Link(latency=1.02 * found.latency)),
    ):
        assert program.makespan(replace(costs, link=link)) <= limit * (1 + 1e-9)
        assert program.makespan(replace(costs, link=slower)) > limit


def test_breadth_first_leaves_reductions_and_messages_more_time_than_1f1b() -> None:
    costs = Costs(forward=1.0, backward=2.0, reduction=1.0, message=1.0)
    many = with_chunks(costs, Placement(8), 2)
    plain = demands(Program(generate("1f1b", ranks=8, microbatches=32)), costs)
    broad = demands(Program(generate("breadth_first", ranks=8, chunks=2, microbatches=32)), many)
    assert broad.reduction_window > 2.0 * plain.reduction_window
    assert broad.send_window > 2.0 * plain.send_window
    assert broad.bandwidth < 0.5 * plain.bandwidth


def test_replicas_take_over_for_a_lost_rank() -> None:
    costs = Costs(forward=1.0, backward=2.0, weight=1.0)
    for ranks, microbatches in ((2, 4), (4, 8), (8, 32)):
        healthy = rerouted_makespan(ranks, microbatches, 3, costs, lost=None)
        assert healthy == Program(generate("1f1b", ranks=ranks, microbatches=microbatches)).makespan(costs)
        for stage in range(ranks):
            lost = rerouted_makespan(ranks, microbatches, 3, costs, lost=stage, split=True)
            # The two ranks that are left for the stage have half as many micro-batches more.
            assert lost >= 3.0 * microbatches * 3 / 2
            assert lost > rerouted_makespan(ranks, microbatches, 3, costs, lost=None, split=True)
    with pytest.raises(ConfigError, match="at least 2 replicas"):
        rerouted_makespan(4, 8, 1, costs, lost=1)


def test_text_shows_every_computation_in_its_place() -> None:
    timeline = Program(generate("zb_h1", ranks=3, microbatches=3)).run(
        Costs(forward=1.0, backward=2.0, weight=1.0)
    )
    lines = text(timeline, width=120).splitlines()
    assert len(lines) == 4 and max(map(len, lines[:3])) <= 120
    for rank, spans in enumerate(timeline.spans):
        assert re.findall(r"[FBW]\d", lines[rank]) == [
            f"{s.action.kind.value}{s.action.microbatch}" for s in spans
        ]
    # One step is as wide in each row: the first forward of rank 1 begins where rank 0's ends.
    wide = lines[0].index("F1") - lines[0].index("F0")
    assert lines[1].index("F0") - lines[0].index("F0") == wide
    assert "zb_h1" in lines[3] and lines[3].endswith("simulated")
    assert max(map(len, text(timeline, width=40).splitlines()[:3])) <= 40


def test_svg_is_well_formed_and_to_scale() -> None:
    schedule = generate("interleaved", ranks=2, chunks=2, microbatches=4)
    costs = Costs(forward=1.0, backward=2.0, message=1.0, link=Link(0.2, 4.0), reduction=0.5)
    timeline = Program(schedule).run(costs)
    root = ElementTree.fromstring(svg(timeline, 900))
    tag = "{http://www.w3.org/2000/svg}"
    bars = [each for each in root.iter(f"{tag}rect") if each.get("fill", "").startswith("#") and len(each)]
    titles = [each.findtext(f"{tag}title") for each in bars]
    assert sorted(titles) == sorted(str(s.action) for spans in timeline.spans for s in spans)
    forward, backward = (bars[titles.index(title)] for title in ("0F0", "0B0"))
    assert float(backward.get("width", 0)) == pytest.approx(2 * float(forward.get("width", 0)), abs=0.02)
    assert all(float(e.get("x", 0)) + float(e.get("width", 0)) <= 900 for e in root.iter(f"{tag}rect"))
    transfers = [e for e in root.iter(f"{tag}rect") if e.get("class") in ("sent", "late") and len(e)]
    assert len(transfers) == len(timeline.transfers)
    assert sum(e.get("class") == "reduce" and len(e) for e in root.iter(f"{tag}rect")) == 4


def test_seconds_have_a_unit() -> None:
    assert [seconds(value) for value in (2.0, 0.0123456, 4e-6, 0.0)] == ["2 s", "12.35 ms", "4 us", "0 us"]
