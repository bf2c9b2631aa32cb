"""A run whose ranks are all killed, also within saves, continues to the bit: losses, weights, RNG."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.resume.campaign import LAYOUTS, POINTS
from tests.second_lane import DAILY

REDUCED: list[dict[str, Any]] = [
    {"layout": "dp2", "bf16": False, "kills": 2 if DAILY else 1, "seed": 3},
    *(
        [
            # A negative control: what is drawn after a kill must matter.
            {"layout": "dp2", "bf16": False, "kills": 1, "seed": 7, "forget_rng": True},
            {"layout": "tp2", "bf16": True, "kills": 1, "seed": 5},
        ]
        if DAILY
        else []
    ),
]
EXPERTS = {"layout": "ep2", "bf16": True, "kills": 1, "seed": 11}
KILLS = 20


def campaigns(folder: str, cases: list[dict[str, Any]], timeout: float) -> list[dict[str, Any]]:
    """The results of ``cases``, from one process that all ranks are forked from."""
    done = run_ranks(1, "tests.resume.campaign:campaign", folder, cases, timeout=timeout)[0]
    return list(done)


def differing_steps(found: dict[str, Any]) -> list[int]:
    """Steps that the killed run recorded other than the one that was left alone."""
    whole = {step: rest for step, *rest in found["whole"]}
    assert sorted(whole) == list(range(1, found["steps"] + 1))
    assert {step for step, *_ in found["killed"]} == set(whole), "a step is missing"
    return sorted({step for step, *rest in found["killed"] if whole[step] != rest})


def check(found: dict[str, Any]) -> None:
    """The killed run is the other one to the bit, and nothing of a half-made checkpoint is left."""
    assert differing_steps(found) == [], found["kills"]
    assert found["killed_files"] == found["whole_files"], found["kills"]
    assert found["hidden"] == []


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return campaigns(str(tmp_path_factory.mktemp("kills")), REDUCED, timeout=500)


@pytest.mark.parametrize("index", [0, *range(2, len(REDUCED))])
def test_a_killed_run_continues_to_the_bit(reduced: list[dict[str, Any]], index: int) -> None:
    check(reduced[index])
    assert len(reduced[index]["kills"]) == REDUCED[index]["kills"]


@pytest.mark.daily
def test_forgetting_random_states_would_be_noticed(reduced: list[dict[str, Any]]) -> None:
    assert differing_steps(reduced[1]) != []


@pytest.mark.daily
def test_a_killed_run_with_experts_continues_to_the_bit(tmp_path: Path) -> None:
    [found] = campaigns(str(tmp_path), [EXPERTS], timeout=300)
    check(found)
    assert len(found["kills"]) == EXPERTS["kills"]


@pytest.mark.soak
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_kills_under_every_layout(
    tmp_path_factory: pytest.TempPathFactory, record_property: Any, layout: str, bf16: bool
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"{layout} bf16={bf16}: seed {seed}")
    case = {"layout": layout, "bf16": bf16, "kills": KILLS, "seed": seed}
    found = campaigns(str(tmp_path_factory.mktemp(layout)), [case], timeout=1500)[0]
    for name in ("seconds", "steps"):
        record_property(name, found[name])
    record_property("seed", seed)
    record_property("kills", len(found["kills"]))
    record_property("repeated steps", len(found["killed"]) - found["steps"])
    for how in ("sync", "async"):
        record_property(how, sum(each.startswith(how) for each in found["kills"]))
    record_property("within saves", sum("point='" in each for each in found["kills"]))
    check(found)
    assert len(found["kills"]) == KILLS


@pytest.mark.soak
def test_a_kill_at_every_point_of_both_kinds_of_save(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = {"layout": "dp2", "bf16": False, "kills": 2 * len(POINTS), "seed": 1, "every_point": True}
    found = campaigns(str(tmp_path_factory.mktemp("points")), [case], timeout=900)[0]
    check(found)
    assert [each.split("point='")[1].split("'")[0] for each in found["kills"]] == [
        point for point in POINTS for _ in range(2)
    ]
