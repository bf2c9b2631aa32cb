"""What follows from a straggler: what is measured, when the run leaves, and who is excluded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.hosts import parse_hostfile, read_excluded, remaining
from mt_megatron.scan.format.run_files import run_files
from mt_megatron.scan.respond.confirm import Confirmation, Request
from mt_megatron.scan.respond.straggler_policy import Exclusion, StragglerPolicy, exclude

HOSTS = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(said: list[str], clock: Clock) -> StragglerPolicy:
    return StragglerPolicy(HOSTS, said.append, clock)


def finding(**changes: Any) -> dict[str, Any]:
    return {"cause": "slow_compute", "ranks": [2], "confidence": 0.9, "named_at_step": 40, **changes}


def result(request: Request, verdict: Any) -> Confirmation:
    return Confirmation(
        identity=request.identity,
        what=request.what,
        ranks=request.ranks,
        verdict=verdict,
        ratio=1.4,
        low=1.3,
        high=1.5,
        seconds=1.0,
        text="1.40 times # the others' time",
    )


def test_a_confirmed_straggler_ends_the_run(policy: StragglerPolicy, said: list[str]) -> None:
    policy.heard(finding())
    request = policy.request
    assert request is not None and (request.what, request.ranks) == ("compute", (2,))
    assert policy.leave is None, "nothing follows from a finding alone"
    policy.measured(result(request, "confirmed"))
    assert policy.leave is not None and policy.leave.host == "node-b" and policy.request is None
    assert "code 79" in said[-1]


@pytest.mark.parametrize("verdict", ["refuted", "inconclusive"])
def test_one_that_is_not_confirmed_does_not(
    policy: StragglerPolicy, clock: Clock, said: list[str], verdict: str
) -> None:
    policy.heard(finding())
    assert policy.request is not None
    policy.measured(result(policy.request, verdict))
    assert policy.leave is None and "training goes on" in said[-1]
    policy.heard(finding())
    assert policy.request is None, "not again at once"
    clock.seconds = 61.0
    policy.heard(finding())
    assert policy.request is not None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"confidence": 0.4}, None),
        ({"ranks": []}, None),
        ({"cause": "slow_data"}, "nothing that can be measured"),
        ({"cause": "slow_link", "ranks": [1, 2]}, "not one host's"),
        ({"cause": "slow_node_link", "ranks": [2, 3]}, "no other is there to compare with"),
        ({"ranks": [9]}, "not one host's"),
    ],
)
def test_what_no_measurement_or_no_host_answers_for_is_left_alone(
    policy: StragglerPolicy, said: list[str], changes: dict[str, Any], why: str | None
) -> None:
    for _ in range(3):
        policy.heard(finding(**changes))
    assert policy.request is None and policy.leave is None
    assert (why is None and not said) or (why is not None and len(said) == 1 and why in said[0])


def test_a_nodes_link_is_measured_across_its_border(said: list[str]) -> None:
    policy = StragglerPolicy({**HOSTS, 4: "node-c"}, said.append)
    policy.heard(finding(cause="slow_node_link", ranks=[2, 3]))
    assert policy.request is not None and policy.request.what == "link" and policy.request.ranks == (2, 0)


def test_a_link_within_a_host_is_measured_itself(policy: StragglerPolicy) -> None:
    policy.heard(finding(cause="slow_link", ranks=[2, 3]))
    assert policy.request is not None and policy.request.what == "link" and policy.request.ranks == (2, 3)


def test_what_cannot_be_measured_is_never_asked_for(policy: StragglerPolicy, said: list[str]) -> None:
    policy.heard(finding(cause="slow_link", ranks=[2]))
    assert policy.request is None and "cannot be measured: found 1 ranks for a link" in said[0]


def test_the_last_host_is_not_excluded(said: list[str]) -> None:
    policy = StragglerPolicy({0: "node-a", 1: "node-a"}, said.append)
    policy.heard(finding(ranks=[1]))
    assert policy.request is None and "no host would be left" in said[0]


def test_answers_to_other_questions_are_not_taken(policy: StragglerPolicy) -> None:
    policy.heard(finding())
    policy.measured(result(Request(identity="another", what="compute", ranks=(2,)), "confirmed"))
    assert policy.leave is None and policy.request is not None


def test_the_launcher_reads_what_a_run_listed(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    files.root.mkdir()
    listed = Exclusion(host="node-b", ranks=(2,), cause="slow_compute", reason="twice\nthe # time")
    path = exclude(files, listed)
    exclude(files, listed)
    exclude(files, Exclusion(host="node-c", ranks=(5,), cause="slow_compute", reason="x"))
    assert [host.name for host in read_excluded(path)] == ["node-b", "node-c"]
    assert path.read_text().count("\n") == 2 and path.stat().st_mode & 0o777 == 0o600
    assert read_excluded(tmp_path / "none") == []


def test_what_is_left_of_a_hostfile(tmp_path: Path) -> None:
    hosts = parse_hostfile("node-a\nnode-b.cluster\nnode-c\n192.0.2.4\n")
    excluded = parse_hostfile("NODE-B\n192.0.2.4\nnode-x\n")
    assert [host.name for host in remaining(hosts, excluded, None)] == ["node-a", "node-c"]
    assert [host.name for host in remaining(hosts, excluded, 1)] == ["node-a"]
    with pytest.raises(ConfigError, match=r"2 of 4 hosts are left .* expected 3"):
        remaining(hosts, excluded, 3)
    both = parse_hostfile("node-b.east\n")
    assert len(remaining(both, parse_hostfile("node-b.west\n"), None)) == 1, "full names differ"
