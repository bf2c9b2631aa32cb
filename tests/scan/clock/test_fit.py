"""Known clocks are recovered from pings, collectives and causality, and what is not known is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mt_megatron.scan.clock.edges import exchanges, fit_edge
from mt_megatron.scan.clock.fit import Clocks, fit_clocks
from mt_megatron.scan.clock.offset_lines import OffsetLine
from mt_megatron.scan.format.records import ASYNC, PING, WAIT
from mt_megatron.scan.format.segments import Group
from tests.launch import run_command

from .clock_data import (
    SECOND,
    START,
    FalseClock,
    Rank,
    collectives,
    errors,
    pings,
    rank_on,
    transfers,
    with_spans,
)

FALSE = (
    FalseClock(),
    FalseClock(offset=SECOND, drift=50e-6),
    FalseClock(offset=-SECOND, drift=-50e-6),
    FalseClock(offset=3 * 10**16, drift=20e-6, wander=100_000),
)
"""The last machine has been up for a year longer, and its clock's speed changes."""


def job(rng: np.random.Generator, clocks: tuple[FalseClock, ...] = FALSE) -> dict[int, Rank]:
    return {
        rank: rank_on(f"machine {rank}", pings=pings(clocks, rank, 0, rng) if rank else np.zeros(0, PING))
        for rank in range(len(clocks))
    }


def early(found: Clocks, ranks: dict[int, Rank], source: int, target: int) -> int:
    sends, receives = ranks[source].spans, ranks[target].spans
    sent = sends[(sends["name"] == 2) & (sends["peer"] == target)]
    received = receives[(receives["name"] == 3) & (receives["peer"] == source)]
    return int(
        (found.to_reference(target, received["end"]) < found.to_reference(source, sent["begin"])).sum()
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_second_and_fifty_ppm_are_found_to_fifty_microseconds(seed: int) -> None:
    found = fit_clocks(job(np.random.default_rng(seed)))
    for rank in (1, 2, 3):
        assert np.quantile(errors(found, FALSE, rank), 0.99) < 50_000
        assert found.residuals[rank].source == "pings"
    assert found.residuals[1].drift_ppm == pytest.approx(50, abs=0.5)
    assert np.quantile(errors(Clocks(reference=0), FALSE, 1), 0.01) > 0.9 * SECOND  # without a fit


def test_the_slowest_exchanges_say_nothing() -> None:
    rng = np.random.default_rng(0)
    ranks = job(rng, FALSE[:2])
    slow = pings(FALSE, 1, 0, rng, seconds=(20, 40), slow=400.0)
    found = fit_clocks({**ranks, 1: replace(ranks[1], pings=np.concatenate([ranks[1].pings, slow]))})
    assert np.quantile(errors(found, FALSE, 1), 0.99) < 50_000


def test_one_ping_gives_the_offset_within_half_its_round_trip() -> None:
    one = pings(FALSE, 1, 0, np.random.default_rng(0), seconds=(0,), count=1)
    fit = fit_edge(exchanges([one], []))
    assert fit is not None and fit.pings == 1
    moment = FALSE[1](np.array([START]))
    assert abs(int(fit.line(moment)[0]) - START) <= fit.uncertainty + 1_000


def test_impossible_exchanges_are_left_out() -> None:
    some = pings(FALSE, 1, 0, np.random.default_rng(0))
    some["returned"][::2] = some["sent"][::2] - 5  # a clock that was set back
    assert len(exchanges([some], []).at) == len(some) // 2
    assert fit_edge(exchanges([some[:0]], [])) is None


def test_whoever_asks_the_offset_is_the_same() -> None:
    rng = np.random.default_rng(0)
    there = fit_clocks(job(rng, FALSE[:2]))
    ranks = {0: rank_on("a", pings=pings(FALSE, 0, 1, rng)), 1: rank_on("b")}
    assert np.quantile(errors(there, FALSE, 1), 0.99) < 50_000
    assert np.quantile(errors(fit_clocks(ranks), FALSE, 1), 0.99) < 50_000


def test_ranks_of_a_machine_share_its_clock() -> None:
    rng = np.random.default_rng(0)
    clocks = (FALSE[0], FALSE[0], FALSE[1], FALSE[1])
    ranks = {
        0: rank_on("a"),
        1: rank_on("a", pings=pings(clocks, 1, 0, rng, count=16)),
        2: rank_on("b", pings=pings(clocks, 2, 0, rng)),
        3: rank_on("b", pings=pings(clocks, 3, 2, rng, count=16)),
    }
    found = fit_clocks(ranks)
    times = np.arange(5)
    assert found.to_reference(1, times) is times
    assert [found.residuals[rank].source for rank in range(4)] == [
        "reference",
        "same clock",
        "pings",
        "pings",
    ]
    assert np.quantile(errors(found, clocks, 3), 0.99) < 50_000
    assert found.notes == ()


@pytest.mark.parametrize("peer", [0, 2], ids=["directly", "by a third rank"])
def test_pings_unmask_ranks_that_only_seem_to_share_a_clock(peer: int) -> None:
    rng = np.random.default_rng(0)
    clocks = (FALSE[0], FALSE[0], FALSE[2], FalseClock(offset=40_000_000))
    machines = {0: ["a", "b", "c", "a"], 2: ["a", "b", "b", "b"]}[peer]
    ranks = {rank: rank_on(machine) for rank, machine in enumerate(machines)}
    for rank, target in ((1, 0), (2, 0), (3, 0)):
        ranks[rank] = replace(ranks[rank], pings=pings(clocks, rank, target, rng))
    found = fit_clocks(ranks)
    assert any("rank 3 gets its own" in note for note in found.notes)
    assert np.quantile(errors(found, clocks, 3), 0.99) < 50_000


def test_a_way_of_two_hops_is_followed() -> None:
    rng = np.random.default_rng(0)
    ranks = {
        0: rank_on("a"),
        1: rank_on("b", pings=pings(FALSE, 1, 0, rng)),
        2: rank_on("c", pings=pings(FALSE, 2, 1, rng)),
    }
    found = fit_clocks(ranks)
    assert found.residuals[2].hops == 2
    assert found.residuals[2].uncertainty > found.residuals[1].uncertainty
    assert np.quantile(errors(found, FALSE, 2), 0.99) < 50_000


def test_a_triangle_that_does_not_close_is_reported() -> None:
    rng = np.random.default_rng(0)
    ranks = job(rng, FALSE[:3])
    honest = pings(FALSE, 2, 1, rng)
    closed = fit_clocks({**ranks, 2: replace(ranks[2], pings=np.concatenate([ranks[2].pings, honest]))})
    assert closed.residuals[2].triangle < 50_000
    bent = honest.copy()
    bent["received"] += 700_000
    bent["answered"] += 700_000
    open_ = fit_clocks({**ranks, 2: replace(ranks[2], pings=np.concatenate([ranks[2].pings, bent]))})
    assert open_.residuals[2].triangle == pytest.approx(700_000, rel=0.1)
    assert np.isnan(fit_clocks(ranks).residuals[2].triangle)


def test_without_pings_the_ends_of_collectives_are_used_and_said() -> None:
    rng = np.random.default_rng(0)
    spans = collectives(FALSE[:3], rng)
    ranks = {rank: with_spans(rank_on(f"m{rank}"), spans[rank], members=range(3)) for rank in range(3)}
    found = fit_clocks(ranks)
    assert found.residuals[1].source == "collectives"
    assert np.quantile(errors(found, FALSE, 1), 0.99) < 100_000
    assert any("no pings join rank 1 to rank 0" in note for note in found.notes)


def test_another_group_of_the_same_ranks_takes_nothing_away() -> None:
    rng = np.random.default_rng(0)
    spans = collectives(FALSE[:2], rng)
    # Made later, and without any operation that binds clocks.
    world = {2: Group(name="world", ranks=(0, 1))}
    ranks = {}
    for rank in range(2):
        made = with_spans(rank_on(f"m{rank}"), spans[rank], members=range(2))
        ranks[rank] = replace(made, groups={**made.groups, **world})
    found = fit_clocks(ranks)
    assert found.residuals[1].source == "collectives"
    assert np.quantile(errors(found, FALSE, 1), 0.99) < 100_000
    assert found.causality is not None and found.causality.pairs > 0


def test_without_anything_the_wall_clocks_are_used_and_said() -> None:
    ranks = {
        rank: replace(
            rank_on(f"m{rank}"),
            meta={"boot_id": f"m{rank}", "monotonic_ns": 1_000 * rank, "unix_ns": 5_000_000},
        )
        for rank in range(2)
    }
    found = fit_clocks(ranks)
    assert found.residuals[1].source == "unix time"
    assert found.to_reference(1, np.array([1_000], dtype=np.int64)).tolist() == [0]
    silent = fit_clocks({rank: rank_on(f"m{rank}") for rank in range(2)})
    assert silent.residuals[1].source == "none" and "taken as it is" in silent.notes[0]


def biased(rng: np.random.Generator) -> dict[int, Rank]:
    """Pings whose ways differ by 60 us, so that the fit is 30 us off, and transfers of 3 us."""
    ranks = job(rng, FALSE[:3])
    for rank in (1, 2):
        bent = ranks[rank].pings.copy()
        bent["returned"] += 60_000 if rank == 1 else 0
        bent["sent"] -= 60_000 if rank == 2 else 0
        ranks[rank] = replace(ranks[rank], pings=bent)
    for source, target in ((0, 1), (1, 2), (2, 0), (1, 0), (0, 2), (2, 1)):
        out, back = transfers(FALSE, rng, source, target)
        ranks[source] = with_spans(ranks[source], out)
        ranks[target] = with_spans(ranks[target], back)
    return ranks


def test_nothing_is_received_before_it_was_sent() -> None:
    ranks = biased(np.random.default_rng(0))
    edges = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)]
    blind = fit_clocks({rank: replace(each, spans=each.spans[:0]) for rank, each in ranks.items()})
    assert sum(early(blind, ranks, *edge) for edge in edges) > 1_000
    found = fit_clocks(ranks)
    assert [early(found, ranks, *edge) for edge in edges] == [0] * 6
    assert found.causality is not None and found.causality.early > 0 == found.causality.left
    assert 10_000 < found.residuals[1].corrected < 60_000
    # Causality also brings the clocks nearer to the truth than such pings can.
    assert errors(found, FALSE, 1).max() < errors(blind, FALSE, 1).max()


def test_spans_are_read_only_where_they_are_needed() -> None:
    class Unreadable(Rank):
        def __getattribute__(self, name: str) -> object:
            if name in ("spans", "groups", "strings"):
                raise AssertionError(f"{name} was read")
            return super().__getattribute__(name)

    rng = np.random.default_rng(0)
    some = {rank: Unreadable(meta=each.meta, pings=each.pings) for rank, each in job(rng).items()}
    assert fit_clocks(some, causality=False).causality is None
    with pytest.raises(AssertionError, match="was read"):
        fit_clocks(some)
    assert fit_clocks({rank: Unreadable(meta={"boot_id": "a"}) for rank in range(2)}).notes == ()


def test_nobody_leaves_a_collective_before_the_last_has_come() -> None:
    rng = np.random.default_rng(0)
    ranks = job(rng, FALSE[:3])
    bent = ranks[1].pings.copy()
    bent["returned"] += 80_000
    ranks[1] = replace(ranks[1], pings=bent)
    spans = collectives(FALSE[:3], rng, lag=2_000.0)
    ranks = {rank: with_spans(ranks[rank], spans[rank], members=range(3)) for rank in range(3)}

    def slack(found: Clocks) -> int:
        ends = np.stack([found.to_reference(rank, spans[rank]["end"]) for rank in range(3)])
        begins = np.stack([found.to_reference(rank, spans[rank]["begin"]) for rank in range(3)])
        return int((ends.min(axis=0) - begins.max(axis=0)).min())

    blind = fit_clocks({rank: replace(each, spans=each.spans[:0]) for rank, each in ranks.items()})
    assert slack(blind) < 0 <= slack(fit_clocks(ranks))


def test_what_was_matched_wrongly_is_not_obeyed() -> None:
    rng = np.random.default_rng(0)
    ranks = job(rng, FALSE[:2])
    out, back = transfers(FALSE, rng, 0, 1)
    back["end"] -= 5 * SECOND
    found = fit_clocks({0: with_spans(ranks[0], out), 1: with_spans(ranks[1], back)})
    assert np.quantile(errors(found, FALSE, 1), 0.99) < 50_000
    assert any("contradict the clocks" in note for note in found.notes)


@pytest.mark.parametrize(("name", "flag"), [("recv", ASYNC), ("send", WAIT)])
def test_starts_and_waits_bind_only_where_they_do(name: str, flag: int) -> None:
    """A receive that was only started has received nothing; a wait for a send is after it."""
    rng = np.random.default_rng(0)
    ranks = job(rng, FALSE[:2])
    out, back = transfers(FALSE, rng, 0, 1)
    extra = (back if name == "recv" else out).copy()
    extra["end" if name == "recv" else "begin"] += -400_000 if name == "recv" else 400_000

    def pairs(flags: int) -> tuple[int, int]:
        extra["flags"] = flags
        more = {0: [out], 1: [back]}
        more[1 if name == "recv" else 0].append(extra)
        found = fit_clocks({rank: with_spans(ranks[rank], *spans) for rank, spans in more.items()})
        assert found.causality is not None
        return found.causality.pairs, found.causality.early

    assert pairs(flag) == (len(out), 0)
    # As if it were the whole transfer: nobody knows which of two with one number is meant.
    assert pairs(0) == (0, 0)


def test_where_a_device_queues_its_work_the_host_binds_nothing() -> None:
    rng = np.random.default_rng(0)
    ranks = job(rng, FALSE[:2])
    out, back = transfers(FALSE, rng, 0, 1)
    back["end"] -= 300_000  # the host has gone on
    spans = {0: with_spans(ranks[0], out), 1: with_spans(ranks[1], back)}
    host = fit_clocks(spans)
    assert host.causality is not None and host.causality.early > 0
    queued = {rank: replace(each, meta={**each.meta, "device_type": "cuda"}) for rank, each in spans.items()}
    device = fit_clocks(queued)
    assert device.causality is not None and device.causality.pairs == 0


def test_device_times_before_the_host_asked_are_said() -> None:
    rng = np.random.default_rng(0)
    spans = collectives(FALSE[:1], rng)[0]
    spans["device_begin"] = spans["begin"] + 5_000 + rng.exponential(50_000, len(spans)).astype(np.int64)
    spans["device_end"] = spans["device_begin"] + 1_000
    host = Rank(meta={"boot_id": "a", "device_type": "cuda"})
    sound = fit_clocks({0: with_spans(host, spans)})
    assert sound.notes == () and sound.residuals[0].device is not None
    assert sound.residuals[0].device.early == 0 and abs(sound.residuals[0].device.drift_ppm) < 1
    for field in ("device_begin", "device_end"):
        spans[field] += np.rint((spans["begin"] - START) * -30e-6).astype(np.int64)
    drifting = fit_clocks({0: with_spans(host, spans)})
    assert drifting.residuals[0].device is not None
    assert drifting.residuals[0].device.drift_ppm == pytest.approx(-30, abs=1)
    assert "anchored wrongly" in drifting.notes[0]


def test_lines_go_there_and_back() -> None:
    line = OffsetLine(
        knots=np.array([100, 10**9, 3 * 10**9]),
        base=3 * 10**16,
        delta=np.array([0.0, 50_000.0, -20_000.0]),
        slope_before=20e-6,
        slope_after=-30e-6,
    )
    times = np.linspace(-(10**9), 5 * 10**9, 777).astype(np.int64)
    assert np.abs(line.inverse()(line(times)) - times).max() <= 2
    other = OffsetLine(knots=line(np.array([5 * 10**8])), base=-7, delta=np.array([3.0]), slope_after=1e-5)
    assert np.abs(line.then(other)(times) - other(line(times))).max() <= 2
    moved = line.plus(line(np.array([0, 2 * 10**9])), np.array([0.0, 1_000.0]))
    assert int(moved(np.array([10**9]))[0] - line(np.array([10**9]))[0]) == pytest.approx(500, abs=2)
    assert (np.diff(line(np.sort(times))) > 0).all()


def test_nothing_and_one_rank() -> None:
    assert fit_clocks({}).to_reference(3, np.arange(3)).tolist() == [0, 1, 2]
    alone = fit_clocks({5: rank_on("a")})
    assert alone.reference == 5 and alone.residuals[5].source == "reference"
    assert alone.to_dict()["ranks"][0]["round_trip_min"] is None


def test_clocks_need_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; import mt_megatron.scan.clock.fit; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_processes_with_false_clocks_are_put_right(seconds: int) -> None:
    """Real processes, sockets and messages. In two seconds on a busy machine few exchanges are fast, in sixty
    enough are; that nothing is received before it was sent holds either way."""
    script = Path(__file__).parents[3] / "benchmarks" / "scan" / "scan_clock.py"
    load = "2" if seconds >= 60 else "0"
    command = [sys.executable, str(script), "--seconds", str(seconds), "--load", load, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    done = run_command(command, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["early_messages"] == 0 < figures["early_messages_uncorrected"]
    assert figures["error_p99"] < (50 if seconds >= 60 else 20_000)
