"""Transports that ``auto`` takes for ranks, and refusals; computed from what ranks say."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, get_args, get_type_hints

import pytest
import torch

from mt_megatron.comm import kinds
from mt_megatron.comm.bootstrap import Place
from mt_megatron.comm.choice import Failure, Plan, Rank, choose
from mt_megatron.comm.errors import TransportError
from mt_megatron.comm.per_edge import PerEdgeTransport
from mt_megatron.comm.transport import Edge
from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import ParallelConfig
from mt_megatron.errors import ConfigError, MtMegatronError
from mt_megatron.launching.scripts.choice import TRANSPORT, Choice
from mt_megatron.seams.transport import NAMES
from mt_megatron.training.validate import validate
from tests.training.loop_cases import MODEL, TRAINING

NO_VERBS = "there is no verbs device"


def job(
    *hosts: str, stages: int = 0, wish: str = "auto", verbs: bool = False, loops: bool = False, **changes: Any
) -> list[Rank]:
    """Ranks on ``hosts``, in pipelines of ``stages`` neighbours each (0: one pipeline)."""
    stages = stages or len(hosts)
    ranks = []
    for rank, host in enumerate(hosts):
        first = rank - rank % stages
        ranks.append(
            Rank(
                place=Place(rank=rank, host=host, pid=rank, boot=f"boot of {host}", network="net", user=7),
                pipelines=(tuple(range(first, first + stages)),),
                loops=loops,
                device="cpu",
                library="gloo",
                unusable={} if verbs else {"rdma": NO_VERBS},
                wish=wish,
            )
        )
    return [dataclasses.replace(each, **changes) for each in ranks]


def taken(plan: Plan, *pairs: tuple[int, int]) -> list[str]:
    """By edge; both directions and all lanes of two ranks have the same."""
    found = [plan.kind_of(Edge(*pair, 0)) for pair in pairs]
    assert found == [plan.kind_of(Edge(target, source, 1)) for source, target in pairs]
    return found


def test_the_line_says_where_the_ring_has_no_helper() -> None:
    ranks = job("a", "a", "b", "b", verbs=True)
    assert "Python alone" not in Plan(ranks).line()
    ranks[2:] = [dataclasses.replace(each, has_ring_helper=False) for each in ranks[2:]]
    assert "; shm in Python alone on rank 2 on b and 1 more: its C helper is missing" in Plan(ranks).line()
    alone = [dataclasses.replace(each, has_ring_helper=False) for each in job("a", "b", verbs=True)]
    assert "Python alone" not in Plan(alone).line(), "nothing goes over shared memory"


def test_a_closed_transport_of_edges_says_so() -> None:
    made = PerEdgeTransport({}, lambda edge: "shm")
    with pytest.raises(MtMegatronError, match="was not prepared; give all edges"):
        made.post_send(Edge(0, 1, 0), torch.zeros(1))
    made.close()
    for use in (made.require_open, lambda: made.post_recv(Edge(0, 1, 0), (1,), torch.float32)):
        with pytest.raises(TransportError, match="is closed; make a new one"):
            use()


def test_a_refusal_names_all_ranks_that_lack_something() -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(job(*"abcdefghij", wish="rdma"))
    said = str(caught.value)
    assert f"rank 0 on a: {NO_VERBS}; rank 1 on b: {NO_VERBS}" in said and "rank 7 on h" in said
    assert "; 2 more; expected" in said


def test_shared_memory_within_a_host_and_rdma_between() -> None:
    plan = Plan(job("a", "a", "b", "b", verbs=True))
    assert taken(plan, (0, 1), (1, 2), (2, 3)) == ["shm", "rdma", "shm"]
    assert not plan.is_upstreams(0)
    line = plan.line()
    assert plan.counts() == {"shm": 2, "rdma": 1}
    assert "shm between 2 (2 pairs, such as ranks 0 and 1: same host)" in line
    assert "rdma between 1 (ranks 1 and 2: no shm: " in line


def test_collectives_where_nothing_else_reaches() -> None:
    plan = Plan(job("a", "a", "b", "c"))
    assert taken(plan, (0, 1), (1, 2), (2, 3)) == ["shm", "collective", "collective"]
    assert f"no rdma: rank 1 on a: {NO_VERBS}" in plan.line()


def test_a_pipeline_of_collectives_alone_is_left_to_upstream() -> None:
    plan = Plan(job("a", "a", "b", "c", stages=2))
    assert [plan.is_upstreams(rank) for rank in range(4)] == [False, False, True, True]
    # A stage that is part of two pipelines ties them together.
    ranks = job("a", "b", "a")
    shared = [(0, 1), (0, 2)]
    ranks = [
        dataclasses.replace(each, pipelines=tuple(pair for pair in shared if each.place.rank in pair))
        for each in ranks
    ]
    plan = Plan(ranks)
    assert taken(plan, (0, 1), (0, 2)) == ["collective", "shm"]
    assert [plan.is_upstreams(rank) for rank in range(3)] == [False, False, False]


def test_the_last_and_the_first_stage_are_neighbours_where_it_loops() -> None:
    looped = Plan(job("a", "a", "b", "b", loops=True))
    assert "collective between 2" in looped.line() and looped.counts() == {"shm": 2, "collective": 2}
    assert "collective between 1" in Plan(job("a", "a", "b", "b")).line()


def test_containers_and_users_of_one_machine_are_apart() -> None:
    ranks = job("a", "a", "a")
    ranks[1] = dataclasses.replace(ranks[1], place=dataclasses.replace(ranks[1].place, network="other"))
    ranks[2] = dataclasses.replace(
        ranks[2], place=dataclasses.replace(ranks[2].place, network="other", user=8)
    )
    plan = Plan(ranks)
    assert taken(plan, (0, 1), (1, 2)) == ["collective", "collective"]
    assert "network namespaces" in plan.line() and "user 8" in plan.line()


@pytest.mark.parametrize(
    ("library", "expected"), [("nccl", "collective"), ("mccl", "collective"), ("gloo", "shm")]
)
def test_devices_keep_their_own_library(library: str, expected: str) -> None:
    """Which moves tensors between cards; Gloo would go through the host's memory as well."""
    plan = Plan(job("a", "a", device="cuda", library=library))
    assert taken(plan, (0, 1)) == [expected]
    assert plan.is_upstreams(0) == (expected == "collective")
    # Asked for by name it is used.
    assert taken(Plan(job("a", "a", device="cuda", library=library, wish="shm")), (0, 1)) == ["shm"]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            job("a", "a", "b", wish="shm"),
            "shm, which cannot be used here: rank 1 runs on a, rank 2 on b, another m",
        ),
        (job("a", "b", wish="rdma"), f"rdma, which cannot be used here: rank 0 on a: {NO_VERBS}"),
        (job("a", "a", wish="nixl", unusable={"nixl": "it is absent"}), "rank 0 on a: it is absent"),
        ([*job("a", "a")[:1], *job("a", "a", wish="shm")[1:]], "auto on rank 0, shm on rank 1"),
    ],
)
def test_what_was_asked_for_by_name_works_or_is_refused(ranks: list[Rank], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Plan(ranks)


def test_a_transport_that_fails_is_left_out_of_its_pipelines() -> None:
    plan = Plan(job("a", "a", "a", "a", stages=2, verbs=True))
    plan.drop(1, "shm", "no descriptors are left")
    assert taken(plan, (0, 1), (2, 3)) == ["rdma", "shm"]
    plan.drop(0, None, "nobody knows")
    assert taken(plan, (0, 1), (2, 3)) == ["collective", "shm"]
    assert "no shm: rank 1: no descriptors are left" in plan.line()
    with pytest.raises(ConfigError, match="rank 1 on a: no descriptors"):
        Plan(job("a", "a", wish="shm")).drop(1, "shm", "no descriptors")


def test_pipelines_that_fail_one_at_a_time_all_come_to_collectives() -> None:
    """The worst order: in each round the first that still uses another transport, and that one alone."""
    plan = Plan(job(*["a"] * 12, stages=2, verbs=True))
    for attempt in range(plan.rounds):
        failing = [first for first in range(0, 12, 2) if taken(plan, (first, first + 1)) != ["collective"]]
        if not failing:
            break
        (kind,) = taken(plan, (failing[0], failing[0] + 1))
        plan.learn({failing[0]: Failure(kind, "it fails", is_own=True)}, attempt)
    assert attempt > 3, "more rounds than there are transports"
    assert plan.counts() == {"collective": 6}


def test_this_machine_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds.why_not("shm") is None and kinds.why_not("collective") is None

    def refuse(*unused: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "memfd_create (Operation not permitted)" in str(kinds.why_not("shm"))
    monkeypatch.delattr(os, "memfd_create")
    assert "has no memfd_create" in str(kinds.why_not("shm"))


def test_what_a_probe_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str | None:
        raise OSError("libibverbs.so.1: cannot open shared object file")

    broken_kind = dataclasses.replace(kinds.KINDS["rdma"], why_not_here=broken)
    monkeypatch.setitem(kinds.KINDS, "rdma", broken_kind)  # type: ignore[arg-type]
    assert kinds.why_not("rdma") == "OSError: libibverbs.so.1: cannot open shared object file"


def test_the_names_are_the_same_everywhere() -> None:
    assert set(NAMES) == {"auto", *kinds.KINDS}
    assert get_args(get_type_hints(ParallelConfig)["p2p_transport"]) == NAMES
    with pytest.raises(ConfigError, match=r"'smh'.*expected one of auto, shm.*Did you mean shm\?"):
        choose("smh")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--p2p-transport shm", "p2p_transport is shm with pipeline_model_parallel_size 1"),
        (
            "--pipeline-model-parallel-size 2 --p2p-transport rdma --use-ring-exchange-p2p",
            "p2p_transport is rdma with use_ring_exchange_p2p",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_the_start(flags: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        validate(load_config(f"{MODEL} {TRAINING} {flags}".split()), world_size=2)


def test_auto_and_collective_mean_nothing_without_a_pipeline() -> None:
    for name in ("auto", "collective"):
        validate(load_config(f"{MODEL} {TRAINING} --p2p-transport {name}".split()), world_size=1)


def test_the_choice_travels_to_a_scripts_processes() -> None:
    environment = Choice(backend="cpu", transport="shm").environment({})
    assert environment[TRANSPORT] == "shm"
    found = Choice.of_environment(environment)
    assert found is not None and found.transport == "shm"
    assert TRANSPORT not in Choice(backend="cpu").environment({})
