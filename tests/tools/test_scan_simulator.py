"""The simulator: its physics hold, its files are a trace's files, and the truth stays outside."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.cli.main import main
from mt_megatron.errors import ConfigError, ScanError
from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.scan.clock.fit import fit_clocks
from mt_megatron.scan.format.records import KIND, OPEN
from mt_megatron.scan.format.run_files import read_run, run_files
from mt_megatron.scan.format.segments import RankTrace, read_rank
from tools.scan_simulator import (
    Job,
    Layout,
    Truth,
    parse_fault,
    parse_layout,
    simulate,
    with_events,
    write_truth,
)
from tools.scan_simulator.collectives import all_to_all, doubling, ring, transfer
from tools.scan_simulator.schedule import Exchange, Pass, Plan, plan
from tools.scan_simulator.stops import PERIOD, Quota, Stops

LAYOUTS = ("dp=4,tp=2,pp=2", "dp=4,ep=2,pp=2", "dp=2,cp=2,tp=2", "pp=4,vpp=2", "dp=3,tp=4,pp=3,cp=2")


def run_of(folder: Path, layout: str, *faults: str, **more: Any) -> tuple[Path, Truth, Job]:
    seed = more.pop("seed", 1)
    job = Job(layout=parse_layout(layout), **{"steps": 4, "microbatches": 4, **more})
    return folder, simulate(folder, job, [parse_fault(fault) for fault in faults], seed=seed), job


def traces(folder: Path) -> dict[int, RankTrace]:
    files = run_files(folder)
    return {rank: read_rank(files.rank_folder(rank)) for rank in files.ranks()}


def of_kind(trace: RankTrace, kind: str) -> np.ndarray:
    return trace.spans[trace.spans["kind"] == KIND[kind]]


# -- layout and schedule


@pytest.mark.parametrize("text", [*LAYOUTS, "dp=8,ep=4,tp=2", "dp=1,tp=4,pp=4"])
def test_groups_are_those_of_megatron(text: str) -> None:
    ours = parse_layout(text)
    theirs = RankLayout(world_size=ours.world_size, tp=ours.tp, pp=ours.pp, cp=ours.cp, ep=ours.ep)
    for rank in range(ours.world_size):
        at = theirs.coordinates(rank)
        assert ours.coordinates(rank) == {axis: getattr(at, axis) for axis in ("pp", "dp", "cp", "tp", "ep")}
    for name in ("tp", "cp", "dp", "pp", "ep", "dp-cp", "tp-pp", "embedding"):
        assert sorted(ours.members(name).tolist()) == sorted(theirs.groups(name)), name


SHAPES = [(1, 4, 1), (2, 4, 1), (4, 8, 1), (4, 2, 1), (2, 4, 2), (4, 4, 2), (4, 8, 2), (3, 6, 4), (8, 16, 3)]


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), SHAPES)
def test_every_pass_has_its_input_before_it_begins(stages: int, microbatches: int, chunks: int) -> None:
    made = plan(stages, microbatches, chunks)
    holds: dict[int, set[tuple[str, int, int]]] = defaultdict(set)
    sent: dict[int, tuple[str, int, int]] = {}
    last = stages * chunks - 1
    for level in made.levels:
        for stage, position in level.places:
            operation = made.programs[stage][position]
            if isinstance(operation, Pass):
                place = operation.chunk * stages + stage
                edge = place == 0 if operation.direction == "forward" else place == last
                what = operation.direction, operation.microbatch, place
                assert edge or what in holds[stage]
                holds[stage].add(("done", *what[1:]) if operation.direction == "forward" else what)
        # A transfer brings what its sender has computed and not sent yet, in that order.
        for stage, position in level.places:
            operation = made.programs[stage][position]
            if isinstance(operation, Exchange):
                for index, each in enumerate(operation.transfers):
                    identity = made.partners[stage, position, index][1]
                    if each.source == stage:
                        sent[identity] = _product_before(made, stage, position, each.direction)
                for index, each in enumerate(operation.transfers):
                    identity = made.partners[stage, position, index][1]
                    if each.target == stage:
                        other, _ = each.source, each
                        direction, microbatch, place = _product_of(made, identity, other)
                        step = 1 if direction == "forward" else -1
                        holds[stage].add((direction, microbatch, place + step))
    passes = Counter(type(operation) for program in made.programs for operation in program)
    assert passes[Pass] == 2 * stages * microbatches * chunks


def _product_before(made: Plan, stage: int, position: int, direction: str) -> tuple[str, int, int]:
    for operation in reversed(made.programs[stage][:position]):
        if isinstance(operation, Pass) and operation.direction == direction:
            return direction, operation.microbatch, operation.chunk * len(made.programs) + stage
    raise AssertionError(f"stage {stage} sends before it has computed anything {direction}")


def _product_of(made: Plan, identity: int, source: int) -> tuple[str, int, int]:
    for position, operation in enumerate(made.programs[source]):
        if isinstance(operation, Exchange):
            for index, each in enumerate(operation.transfers):
                if each.source == source and made.partners[source, position, index][1] == identity:
                    return _product_before(made, source, position, each.direction)
    raise AssertionError(f"nobody sends {identity}")


def test_interleaving_wants_a_multiple_of_the_stages() -> None:
    with pytest.raises(ConfigError, match="multiple of the stages"):
        plan(4, 6, 2)


# -- collectives


def test_a_ring_takes_its_hops_where_nobody_waits() -> None:
    enter = np.zeros((3, 4))
    left = ring(enter, np.full((3, 4), 5.0), np.full((3, 4), 2.0), 6)
    assert left == pytest.approx(6 * 7.0)


@pytest.mark.parametrize("members", [2, 3, 5, 8])
def test_nobody_leaves_before_the_last_has_come(members: int) -> None:
    enter = np.random.default_rng(members).uniform(0, 100, (50, members))
    gap = np.full((50, members), 1.0)
    rounds = int(np.ceil(np.log2(members)))
    pairs = np.ones((50, members - 1, members))
    last = enter.max(axis=-1, keepdims=True)
    assert (ring(enter, gap, gap, 2 * (members - 1)) >= last).all()
    assert (doubling(enter, np.ones((50, rounds, members))) >= last).all()
    assert (all_to_all(enter, pairs, pairs, 0 * pairs) >= last).all()
    # One round less, and somebody has not heard of everybody.
    assert not (doubling(enter, np.ones((50, rounds - 1, members))) >= last).all()
    assert members == 2 or not (ring(enter, gap, gap, members - 3) >= last).all()


def test_a_slow_link_of_a_ring_holds_those_behind_it() -> None:
    slow = np.ones(4)
    slow[1] = 50.0
    # A reduce-scatter's way into a member crosses every link but the one that leaves it.
    assert ring(np.zeros(4), np.zeros(4), slow, 3).tolist() == [52.0, 3.0, 52.0, 52.0]
    assert ring(np.zeros(4), np.zeros(4), slow, 6).tolist() == [55.0, 55.0, 104.0, 104.0]
    # Bandwidth: all six messages must pass through the narrow place one after another.
    assert ring(np.zeros(4), slow, np.zeros(4), 6).tolist() == [202.0, 300.0, 300.0, 251.0]


@pytest.mark.parametrize("which", ["latency", "extra"])
def test_a_slow_pair_of_an_exchange_delays_both_its_ends(which: str) -> None:
    taken = {"latency": np.ones((3, 4)), "extra": np.zeros((3, 4))}
    taken[which][1, 0] = taken[which][1, 2] = 30.0  # 0 -> 2 and 2 -> 0
    left = all_to_all(np.zeros(4), np.ones((3, 4)), **taken)
    assert left[[0, 2]].min() > 20 > left[[1, 3]].max()


def test_a_transfer_begins_when_both_have_come() -> None:
    sent, received = transfer(np.array([3.0, 9.0]), np.array([7.0, 1.0]), np.array([2.0]), np.array([1.0]))
    assert sent.tolist() == [9.0, 11.0] and received.tolist() == [10.0, 12.0]


def test_a_stop_stretches_work_and_holds_what_would_end_in_it() -> None:
    stops = Stops(np.array([10.0, np.inf]), np.array([30.0, np.inf]))
    hit = stops.begin, stops.end
    begins, ends = np.array([5.0, 5.0]), np.array([15.0, 15.0])
    assert stops.stretch(begins, ends, hit).tolist() == [35.0, 15.0]
    assert stops.stretch(np.array([12.0, 0.0]), np.array([14.0, 1.0]), hit).tolist() == [32.0, 1.0]
    assert stops.hold(np.array([20.0, 20.0]), hit).tolist() == [30.0, 20.0]


def test_a_quota_gives_its_share_of_each_period() -> None:
    quota = Quota(0.25)
    assert quota.end(0.0, 3 * 0.75 * PERIOD) == pytest.approx(2.75 * PERIOD)
    assert quota.throttled == pytest.approx(0.5 * PERIOD)
    # Waiting uses nothing up.
    assert quota.end(5 * PERIOD, 0.5 * PERIOD) == pytest.approx(5.5 * PERIOD)


# -- whole runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trace_is_whole_and_nothing_comes_before_its_cause(layout: str, tmp_path: Path) -> None:
    folder, truth, job = run_of(tmp_path / "run", f"{layout},ranks_per_node=128", checkpoint_every=2)
    ranks = traces(folder)
    assert sorted(ranks) == list(range(job.layout.world_size)) and read_run(run_files(folder))["simulated"]
    collectives: dict[Any, dict[int, tuple[int, int]]] = defaultdict(dict)
    edges: dict[Any, dict[str, tuple[int, int]]] = defaultdict(dict)
    pauses = checkpoints = 0
    for rank, trace in ranks.items():
        assert trace.damaged == () and trace.meta["simulated"]
        assert (trace.spans["end"] >= trace.spans["begin"]).all()
        steps = of_kind(trace, "step")
        assert steps["iteration"].tolist() == [1, 2, 3, 4]
        assert (steps["begin"][1:] >= steps["end"][:-1]).all()
        pauses += len(of_kind(trace, "pause"))
        # The write, the time that training stands still, and the collective after them.
        checkpoints += 3 * len(of_kind(trace, "checkpoint")) // 2
        for span in of_kind(trace, "collective"):
            group = trace.groups[int(span["group"])]
            key = group.name, group.ranks, int(span["seq"])
            assert rank in group.ranks and rank not in collectives[key]
            collectives[key][rank] = int(span["begin"]), int(span["end"])
        for span in of_kind(trace, "p2p"):
            way = trace.strings[span["name"]]
            ends = (rank, int(span["peer"])) if way == "send" else (int(span["peer"]), rank)
            assert way not in edges[(*ends, int(span["seq"]))]
            edges[(*ends, int(span["seq"]))][way] = int(span["begin"]), int(span["end"])
    total = sum(len(trace.spans) for trace in ranks.values())
    assert total == truth.events + pauses + checkpoints
    for (_, members, _), sides in collectives.items():
        assert set(sides) == set(members)
        assert min(end for _, end in sides.values()) >= max(begin for begin, _ in sides.values())
    for sides in edges.values():
        assert set(sides) == {"send", "recv"}
        assert min(end for _, end in sides.values()) >= max(begin for begin, _ in sides.values())
    assert not job.layout.pp > 1 or edges


def waits(trace: RankTrace, group: str, iterations: range) -> float:
    own = of_kind(trace, "collective")
    named = [number for number, each in trace.groups.items() if each.name == group]
    own = own[np.isin(own["group"], named) & np.isin(own["iteration"], list(iterations))]
    return float((own["end"] - own["begin"]).sum())


def test_waiting_is_where_the_slow_rank_is_not(tmp_path: Path) -> None:
    faults = "slow_compute:rank=1,factor=1.3,first=3"
    folder, truth, _ = run_of(tmp_path / "slow", "tp=4", faults)
    clean, _, _ = run_of(tmp_path / "clean", "tp=4")
    slow, usual = traces(folder), traces(clean)
    # Before it begins, the fault changes nothing at all.
    for rank in range(4):
        before = slow[rank].spans["iteration"] < 3
        assert np.array_equal(slow[rank].spans[before], usual[rank].spans[usual[rank].spans["iteration"] < 3])
    waited = {rank: waits(trace, "tp", range(3, 5)) for rank, trace in slow.items()}
    others = min(waited[rank] for rank in (0, 2, 3))
    assert waited[1] < waits(usual[1], "tp", range(3, 5)) and others > 2.5 * waited[1]
    assert truth.faults[0]["culprits"] == [1]


def test_a_slow_link_slows_both_its_users_and_no_other_transfer(tmp_path: Path) -> None:
    folder, _, _ = run_of(tmp_path / "run", "dp=2,pp=2", "slow_link:ranks=1-3,latency_ms=5")
    found = {}
    ranks = traces(folder)
    for sender, receiver in ((0, 2), (2, 0), (1, 3), (3, 1)):
        sends, receives = of_kind(ranks[sender], "p2p"), of_kind(ranks[receiver], "p2p")
        sends = sends[(sends["peer"] == receiver) & (sends["name"] == ranks[sender].strings.index("send"))]
        receives = receives[(receives["peer"] == sender)]
        receives = receives[receives["name"] == ranks[receiver].strings.index("recv")]
        both = np.maximum(sends["begin"], receives["begin"])
        found[sender, receiver] = float(np.median(receives["end"] - both)) / 1e6
    assert min(found[1, 3], found[3, 1]) > 5 and max(found[0, 2], found[2, 0]) < 3


def counted(trace: RankTrace, name: str) -> np.ndarray:
    return trace.counters["value"][trace.counters["name"] == trace.strings.index(name)]


@pytest.mark.parametrize(
    ("fault", "counter", "pause"),
    [
        ("host_pause:rank=1,seconds=0.5", "beat_delay_ns", "stopped"),
        ("host_pause:rank=1,seconds=0.5,mode=gc", "gc_pause_ns", "gc"),
        ("host_contention:rank=1,share=0.4", "run_queue_wait_ns", None),
        ("host_contention:rank=1,share=0.4,mode=quota", "throttled_ns", None),
    ],
)
def test_host_faults_leave_the_traces_that_real_ones_leave(
    fault: str, counter: str, pause: str | None, tmp_path: Path
) -> None:
    folder, _, _ = run_of(tmp_path / "run", "dp=2,tp=2", fault)
    ranks = traces(folder)
    largest = {rank: float(counted(trace, counter).max()) for rank, trace in ranks.items()}
    assert largest[1] > 0.2e9 and largest[1] > 5 * max(largest[rank] for rank in (0, 2, 3))
    if pause:
        spans = of_kind(ranks[1], "pause")
        long = spans[spans["name"] == ranks[1].strings.index(pause)]
        assert (long["end"] - long["begin"]).max() > 0.2e9


def test_slow_batches_empty_their_queue(tmp_path: Path) -> None:
    folder, truth, _ = run_of(tmp_path / "run", "dp=2", "slow_data:rank=1,factor=8")
    ranks = traces(folder)
    taken = {rank: of_kind(trace, "data") for rank, trace in ranks.items()}
    last = {rank: spans[spans["iteration"] == 4] for rank, spans in taken.items()}
    own = {rank: float((spans["end"] - spans["begin"]).sum()) for rank, spans in last.items()}
    assert own[1] > 50e6 > 10 * own[0]
    assert counted(ranks[1], "data_queue_depth")[-1] < counted(ranks[0], "data_queue_depth")[-1]
    usual = run_of(tmp_path / "usual", "dp=2")[1]
    assert truth.step_seconds[-1] > 1.5 * usual.step_seconds[-1]


def test_uneven_work_says_how_much_it_is(tmp_path: Path) -> None:
    folder, _, job = run_of(tmp_path / "run", "dp=4,ep=4", "uneven_work:rank=2,factor=1.5")
    ranks = traces(folder)
    rows = {rank: of_kind(trace, "module")["work"].astype(float) for rank, trace in ranks.items()}
    assert np.stack(list(rows.values())).sum(axis=0) == pytest.approx(4 * job.tokens, rel=1e-3)
    assert np.median(rows[2]) > 1.2 * max(np.median(rows[rank]) for rank in (0, 1, 3))
    folder, _, job = run_of(tmp_path / "dense", "dp=2,tp=2", "uneven_work:rank=2,factor=1.5")
    work = {rank: float(of_kind(trace, "data")["work"][0]) for rank, trace in traces(folder).items()}
    assert work == {0: job.tokens, 1: job.tokens, 2: 1.5 * job.tokens, 3: 1.5 * job.tokens}


def test_a_hang_leaves_open_spans_and_ends_the_run(tmp_path: Path) -> None:
    folder, truth, _ = run_of(tmp_path / "run", "dp=2,tp=2", "hang:rank=3,first=2", steps=10)
    assert truth.steps == 2
    for trace in traces(folder).values():
        assert trace.spans["iteration"].max() == 2
        is_open = trace.spans[trace.spans["end"] == OPEN]
        assert KIND["step"] in is_open["kind"]
        assert not (trace.spans["end"][trace.spans["end"] != OPEN] < 0).any()


def test_the_slow_disk_keeps_all_others_from_going_on(tmp_path: Path) -> None:
    folder, truth, _ = run_of(tmp_path / "run", "dp=4", "slow_checkpoint:rank=2,factor=4", checkpoint_every=2)
    ranks = traces(folder)
    writes = {rank: of_kind(trace, "checkpoint") for rank, trace in ranks.items()}
    written = {
        rank: float(np.median((each["end"] - each["begin"])[each["bytes"] > 0]))
        for rank, each in writes.items()
    }
    assert written[2] > 2.5 * max(written[rank] for rank in (0, 1, 3))
    stood = {rank: (each["end"] - each["begin"])[each["bytes"] < 0].min() for rank, each in writes.items()}
    assert min(stood.values()) >= 0.95 * written[2]


def test_clocks_that_were_set_apart_come_together_again(tmp_path: Path) -> None:
    folder, truth, _ = run_of(tmp_path / "run", "dp=4,ranks_per_node=2", steps=20)
    ranks = traces(folder)
    offsets = [each["offset_ns"] for each in truth.clocks.values()]
    assert abs(offsets[0] - offsets[1]) > 1e6
    fitted = fit_clocks(ranks)
    at = np.array([int(of_kind(ranks[2], "step")["begin"][5])])
    drifts = [each["drift_ppm"] for each in truth.clocks.values()]
    seconds = (int(at[0]) - offsets[1]) / 1e9 - 1000
    apart = offsets[1] - offsets[0] + (drifts[1] - drifts[0]) * 1e3 * seconds
    assert int(fitted.to_reference(2, at)[0]) == pytest.approx(int(at[0]) - apart, abs=100_000)


# -- files, labels, command line


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_equal_seeds_make_equal_files(tmp_path: Path) -> None:
    made = [
        contents(run_of(tmp_path / name, "dp=2,tp=2", seed=seed)[0])
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    assert made[0] == made[1] and made[0].keys() == made[2].keys() and made[0] != made[2]


def test_the_run_does_not_tell_its_faults(tmp_path: Path) -> None:
    folder, truth, _ = run_of(tmp_path / "run", "dp=2,tp=2", "slow_compute:rank=3,factor=1.5")
    text = b"".join(contents(folder).values())
    assert b"slow_compute" not in text and b"factor" not in text and b"offset" not in text
    with pytest.raises(ConfigError, match="keep the truth out"):
        write_truth(folder / "truth.json", folder, truth)
    write_truth(tmp_path / "truth.json", folder, truth)
    assert json.loads((tmp_path / "truth.json").read_text())["faults"][0]["culprits"] == [3]


def test_a_folder_that_holds_a_trace_is_left_alone(tmp_path: Path) -> None:
    run_of(tmp_path / "run", "dp=2")
    with pytest.raises(ScanError, match="holds a trace already"):
        run_of(tmp_path / "run", "dp=2")


def test_long_runs_get_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.scan_simulator.rank_files._SEGMENT_BYTES", 20_000)
    monkeypatch.setattr("tools.scan_simulator.rank_files._MOST_BUFFERED", 10_000)
    folder, truth, _ = run_of(tmp_path / "run", "dp=2,tp=2", steps=12)
    files = list(run_files(folder).rank_folder(1).iterdir())
    assert len(files) > 2
    spans = traces(folder)[1].spans
    assert (spans["kind"] == KIND["step"]).sum() == 12
    assert len(spans[spans["kind"] != KIND["pause"]]) == truth.events // 4


@pytest.mark.parametrize("layout", ["dp=2,tp=2,pp=2", "dp=2,pp=2", "pp=2,vpp=2"])
def test_events_per_step_are_about_what_was_asked(layout: str) -> None:
    from tools.scan_simulator.run import _spans

    assert _spans(with_events(Job(layout=parse_layout(layout)), 500)) == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("slow_cpu:rank=1", "expected one of slow_compute"),
        ("slow_compute:factor=1.2", "says no rank"),
        ("slow_compute:rank=1,seconds=2", "expected rank=, factor=, first=, last="),
        ("slow_compute:rank=x", "is not what rank takes"),
        ("slow_compute:rank=9", "not in 0..7"),
        ("slow_compute:rank=1,factor=0.5", "expected more than 1"),
        ("slow_compute:rank=1,first=9", "begins in step 9; the run has 4"),
        ("host_pause:rank=1,mode=sleep", "expected one of stop, gc"),
        ("slow_link:ranks=0-1", "a link is slow by one of them"),
        ("slow_link:ranks=0-7,latency_ms=5", "never send each other"),
        ("slow_group:group=ep,rank=1,bandwidth=0.5", "has no links"),
        ("slow_node_link:host=1,bandwidth=0.5", "expected one of several machines"),
    ],
)
def test_impossible_faults_are_refused_before_anything_is_written(
    fault: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path / "run", "dp=2,tp=2,pp=2", fault)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["dp=x", "zp=2", "dp=3,ep=2", "vpp=2", "tp=0"])
def test_impossible_layouts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_layout(text)


def test_ranks_beyond_what_is_there_get_a_reason() -> None:
    with pytest.raises(ConfigError, match="layers=0"):
        replace(Job(layout=Layout()), layers=0)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, truth = tmp_path / "run", tmp_path / "truth.json"
    line = ["scan", "simulate", str(run), "--layout", "dp=2,tp=2", "--steps", "3", "--seed", "4"]
    line += ["--fault", "slow_compute:rank=1,factor=1.4,first=2", "--truth", str(truth)]
    assert main(line) == 0
    assert "simulated 3 steps of 4 ranks" in capsys.readouterr().out
    said = json.loads(truth.read_text())
    assert said["simulated"] and said["seed"] == 4 and said["faults"][0]["first"] == 2
    assert read_run(run_files(run))["layout"]["tp"] == 2
    assert main([*line[:3], "--truth", str(run / "truth.json")]) == 2
    assert "choose a file elsewhere" in capsys.readouterr().err
