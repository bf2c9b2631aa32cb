"""Who stands out: ranks among ranks, links among links of their kind."""

from __future__ import annotations

import json
import os
import sys
from itertools import chain, combinations
from pathlib import Path

import pytest

from mt_megatron.scan.respond.outliers import outlying_links, outlying_ranks
from mt_megatron.scan.respond.selftest import ALL_PAIRS_UP_TO, rounds_of_pairs
from tests.launch import run_command

ROOT = Path(__file__).resolve().parents[3]
HOSTS = ("a", "a", "b", "b", "c", "c", "d", "d")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16, 17, 64])
def test_no_rank_has_two_partners_in_a_round_and_no_pair_meets_twice(world_size: int) -> None:
    rounds = rounds_of_pairs(world_size)
    for pairs in rounds:
        ranks = list(chain.from_iterable(pairs))
        assert len(ranks) == len(set(ranks))
    met = list(chain.from_iterable(rounds))
    assert len(met) == len(set(met)) and all(0 <= a < b < world_size for a, b in met)
    if world_size <= ALL_PAIRS_UP_TO:
        assert set(met) == set(combinations(range(world_size), 2))
    else:
        assert set(chain.from_iterable(met)) == set(range(world_size))


def test_a_slow_rank_stands_out_and_a_usual_spread_does_not() -> None:
    usual = [100e9, 98e9, 101e9, 99e9, 97e9, 100e9, 102e9, 96e9]
    assert outlying_ranks("products", usual, HOSTS) == []
    slow = [*usual[:3], 80e9, *usual[4:]]
    assert [one.ranks for one in outlying_ranks("products", slow, HOSTS)] == [(3,)]
    wide = [100e9, 60e9, 130e9, 90e9, 75e9, 110e9, 85e9, 120e9]
    assert outlying_ranks("products", wide, HOSTS) == [], "where all differ nobody stands out"
    fast = [*usual[:3], 200e9, *usual[4:]]
    assert outlying_ranks("products", fast, HOSTS) == []


def test_of_two_ranks_only_a_large_difference_counts() -> None:
    assert outlying_ranks("products", [100e9, 85e9], HOSTS) == []
    assert [one.ranks for one in outlying_ranks("products", [100e9, 70e9], HOSTS)] == [(1,)]


def links(slow: set[tuple[int, int]], *, delay: float = 5e-3) -> list[tuple[int, int, float, float]]:
    return [
        (a, b, (20e-6 if HOSTS[a] == HOSTS[b] else 100e-6) + (delay if (a, b) in slow else 0.0), 1e9)
        for a, b in combinations(range(8), 2)
    ]


def test_links_are_compared_with_those_of_their_kind() -> None:
    assert outlying_links(links(set()), HOSTS) == [], "between hosts all are slower than within one"
    found = outlying_links(links({(1, 4)}), HOSTS)
    assert [(one.what, one.ranks) for one in found] == [("link_delay", (1, 4))]
    assert outlying_links(links({(1, 4)}, delay=90e-6), HOSTS) == [], "less than what matters"


def test_all_links_of_a_rank_or_host_are_its_own() -> None:
    of_rank = {(min(3, other), max(3, other)) for other in range(8) if other not in (2, 3)}
    assert [one.ranks for one in outlying_links(links(of_rank), HOSTS)] == [(3,)]
    of_host = {(a, b) for a, b in combinations(range(8), 2) if (HOSTS[a] == "b") != (HOSTS[b] == "b")}
    assert [one.hosts for one in outlying_links(links(of_host), HOSTS)] == [("b",)]
    two = outlying_links(links({(0, 4), (3, 6)}), HOSTS)
    assert {one.ranks for one in two} == {(0, 4), (3, 6)}


def test_a_narrow_link_stands_out_by_its_speed() -> None:
    some = [(a, b, seconds, 0.25e9 if (a, b) == (2, 6) else rate) for a, b, seconds, rate in links(set())]
    assert [(one.what, one.ranks) for one in outlying_links(some, HOSTS)] == [("link_speed", (2, 6))]


def test_the_command_measures_alone(tmp_path: Path) -> None:
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "mt_megatron.cli", "scan", "selftest", "--backend", "cpu"]
    done = run_command(
        [*command, "--folder", str(tmp_path), "--json", str(tmp_path / "found.json")],
        env={**alone, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing was compared" in done.stdout and "stands out" not in done.stdout
    assert "torchrun --nproc-per-node 2 -m mt_megatron.cli scan selftest --backend cpu\n" in done.stdout
    assert ", from " not in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(rates[0] > 0 for rates in found["rates"].values()) and found["links"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"], "no scratch file stays"
    wrong = run_command(
        [*command, "--folder", str(tmp_path / "none")],
        env={**alone, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert wrong.returncode == 2 and "expected a folder that exists" in wrong.stderr
