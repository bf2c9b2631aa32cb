"""Every schedule computes over a transport, to the bit, what it computes over collectives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.pipeline.execute.table import SCHEDULES
from tests.pipeline.execute.test_executor import require_equal

HERE = "tests.comm.seam_ranks"


def case(pp: int, chunks: int, model: str, *schedules: str | None, **options: Any) -> dict[str, Any]:
    """``schedules``: those of ours beside upstream's."""
    return {
        "model": model,
        "chunks": chunks,
        "schedules": [None, *schedules],
        "microbatches": 2 * pp,
        **options,
    }


TWO_RANKS = [
    case(2, 1, "dense", "1f1b", "zb_h1"),
    case(2, 1, "moe", uneven=False, bf16=True),
    case(2, 2, "moe", "breadth_first"),
    case(2, 1, "dense", "zb_h1", uneven=True),
    case(2, 2, "dense", "breadth_first", uneven=True),
]
CALLS: list[list[Any]] = [
    ["same_over", TWO_RANKS],
    ["in_batches"],
    ["damaged"],
    ["evaluations"],
    ["heard"],
    ["refusals"],
    ["one_fails"],
    ["different_wishes"],
    ["ring_exchange"],
    ["shapes"],
    ["lifecycle"],
]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, f"{HERE}:several", 2, CALLS, timeout=120)


def test_two_stages_equal_collectives(found: list[dict[str, Any]]) -> None:
    """Upstream's 1F1B and interleaved, and ours; experts, and micro-batches of different lengths."""
    require_equal([rank["same_over"] for rank in found], TWO_RANKS)


def test_interleaved_transfers_in_batches(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["in_batches"] == {"batched": [], "overlapped": []}


def test_one_flipped_bit_is_noticed(found: list[dict[str, Any]]) -> None:
    for name in ("None", "zb_h1"):
        differing = [key for rank in found for key in rank["damaged"][name]]
        assert any("linear_fc1" in key for key in differing), name


def test_evaluations_are_the_same(found: list[dict[str, Any]]) -> None:
    for chunks in ("1", "2"):
        expected, *others = found[1]["evaluations"][chunks]
        assert len(expected) == 4 and others == [expected, expected]


def test_events_of_transfers_are_the_same(found: list[dict[str, Any]]) -> None:
    """Each call with its edges, numbers and bytes, and each wait for a transfer in the background."""
    for rank in found:
        for chunks, least in (("1", 8), ("2", 20)):
            expected, got = rank["heard"][chunks]
            assert len(expected) >= least and got == expected


@pytest.mark.parametrize("name", ["not here", "not made", "not prepared"])
def test_an_unusable_transport_is_refused_on_all_ranks_or_replaced(
    found: list[dict[str, Any]], name: str
) -> None:
    first, second = (rank["refusals"][name] for rank in found)
    assert first["error"] == second["error"] and "found --p2p-transport shm" in first["error"]
    reason = {
        "not here": "Operation not permitted",
        "not made": "no Unix socket can be made",
        "not prepared": "Too many open files",
    }[name]
    assert "rank 1 on" in first["error"] and reason in first["error"]
    assert first["upstream"] and second["upstream"] and first["same"] and second["same"]
    (line,) = first["lines"]
    assert second["lines"] == []
    assert "p2p transport auto" in line and "collective between 1" in line and reason in line


@pytest.mark.parametrize("name", ["None", "zb_h1"])
def test_a_rank_that_fails_ends_the_others(found: list[dict[str, Any]], name: str) -> None:
    other, failed = (rank["one_fails"][name] for rank in found)
    assert "must match the size" in failed["errors"][0]
    assert "PeerLost: rank 1 (process" in other["errors"][0]
    assert "it gave up its channels after an error of its own (RuntimeError: The size" in other["errors"][0]
    # The clock is the machine's.
    assert other["moments"][0] - failed["moments"][0] < 15
    for rank in (other, failed):
        # A further step is refused at once, with the first error of all.
        assert "this transport was given up after an error (" in rank["errors"][1]
        assert "RuntimeError: The size of tensor" in rank["errors"][1]
        assert "start the processes anew, or destroy the model parallel groups" in rank["errors"][1]
        assert rank["same"], "and new channels work"


def test_ranks_that_were_asked_for_different_transports_all_say_so(found: list[dict[str, Any]]) -> None:
    assert found[0]["different_wishes"] == found[1]["different_wishes"]
    shm, collective = found[0]["different_wishes"]
    assert "auto on rank 1, shm on rank 0" in shm
    assert "auto on rank 1, collective on rank 0" in collective


def test_ring_exchange_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "found use_ring_exchange_p2p with the transport shm" in rank["ring_exchange"]


def test_shapes_go_the_same_way(found: list[dict[str, Any]]) -> None:
    for rank in found:
        expected, got = rank["shapes"]
        assert got == expected and sum(map(sum, got)) > 10


def test_a_transport_lives_as_long_as_its_groups(found: list[dict[str, Any]]) -> None:
    for rank in found:
        life = rank["lifecycle"]
        assert life["two models"] and life["after a fork"] and life["again"] and life["made again"]
        assert life["in a fork"] == "none" and life["after unpatch"]
        assert life["memory"] == life["memory again"] > 0
        assert life["memory after"] == 0


def test_four_stages_on_two_hosts() -> None:
    """Hosts by what ranks say of themselves: each edge has its transport, and the step is the same."""
    ranks = run_ranks(4, f"{HERE}:two_hosts", 4, timeout=120)
    for rank in ranks:
        assert {name: keys for name, keys in rank["differ"].items() if keys} == {}
        assert len(rank["differ"]) == 4
    assert [rank["transports 1"] for rank in ranks] == ["shm", "shm+collective", "shm+collective", "shm"]
    assert [rank["transports 2"] for rank in ranks] == ["shm+collective"] * 4
    (line,) = ranks[0]["lines 2"]
    assert "shm between 2 (2 pairs, such as ranks 0 and 1: same host)" in line
    assert "collective between 2" in line and "on host0" in line and "no rdma:" in line
    assert "collective between 1" in ranks[0]["lines 1"][0]
    assert all(rank["lines 1"] == rank["lines 2"] == [] for rank in ranks[1:])


def test_an_encoder_with_two_decoders() -> None:
    ranks = run_ranks(3, f"{HERE}:encoder_and_decoder")
    for rank in ranks:
        assert rank["found"] == rank["on two hosts"] == rank["expected"]
    assert ranks[1]["found"][0][0] == ranks[2]["found"][0][0] is not None
    assert ranks[0]["found"][1][1] is not None
    assert "found overlap_p2p_comm on a rank of 2 pipelines" in ranks[0]["refused"]
    assert ranks[2]["odd"] == [True, True]
    assert [rank["transports"] for rank in ranks] == ["shm+collective", "shm", "collective"]


def rows(pp: int) -> list[dict[str, Any]]:
    """Every model, chunks, precision and schedule; lengths that are equal and that are not."""
    found = []
    for chunks, model, bf16 in itertools.product(
        (1, 2), ("dense", "tied", "moe", "grouped", "mtp", "recompute", "biased"), (False, True)
    ):
        names = [name.format(cap=pp + 1 + (chunks - 1) * pp, group=3) for name in SCHEDULES[chunks]]
        options = {"bf16": True} if bf16 else {}
        found.append(case(pp, chunks, model, *names, **options))
        if model in ("dense", "tied"):
            found.append(case(pp, chunks, model, *names, uneven=True, **options))
    if pp > 2:
        batched = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
        found += [case(pp, chunks, "moe", **batched) for chunks in (2, 3)]
    return found


@pytest.mark.daily
def test_four_stages_equal_collectives() -> None:
    cases = [
        case(4, 1, "moe", "zb_h1"),
        case(4, 2, "tied", "hybrid:3", bf16=True),
        case(4, 2, "dense", "breadth_first", uneven=True),
        {**case(2, 2, "dense", "zb_h1", tp=2, sequence_parallel=True), "pp": 2},
    ]
    require_equal(run_ranks(4, f"{HERE}:same_over", 4, cases, timeout=300), cases)


@pytest.mark.soak
@pytest.mark.parametrize("pp", [2, 4])
def test_every_combination_equals_collectives(pp: int, record_property: Any) -> None:
    cases = rows(pp)
    ranks = run_ranks(pp, f"{HERE}:same_over", pp, cases, timeout=1500)
    record_property("comparisons equal to the bit", require_equal(ranks, cases))
