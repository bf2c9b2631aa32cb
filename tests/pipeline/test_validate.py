"""Generated schedules keep every rule, and the validator sees each rule that is broken."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Action, Kind, Placement, Schedule, computations
from mt_megatron.pipeline.choice import parse
from mt_megatron.pipeline.generate.catalogue import NAMES, generate
from mt_megatron.pipeline.lowering import lowered
from mt_megatron.pipeline.simulate.memory import activation_peaks
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.pipeline.sound import is_sound
from mt_megatron.pipeline.validate import _problems, check, validate

from .draws import broken, drawn

SOAK = "MT_MEGATRON_SOAK" in os.environ


def _all_valid(draws: int, ranks: int, microbatches: int) -> Counter[str]:
    names: Counter[str] = Counter()
    for seed in range(draws):
        schedule, caps = drawn(random.Random(seed), ranks=ranks, microbatches=microbatches)
        assert validate(schedule, cap=caps) == [], f"seed {seed}: {schedule.name}"
        assert validate(lowered(schedule), cap=caps) == [], f"seed {seed}: {schedule.name} lowered"
        assert computations(lowered(schedule)) == schedule.ranks
        # Sentences are looked for only where arrays say that something is wrong.
        assert _problems(schedule) == _problems(lowered(schedule)) == []
        names[schedule.name] += 1
    return names


def test_random_schedules_are_valid() -> None:
    assert set(_all_valid(120, 5, 10)) == set(NAMES)


@pytest.mark.soak
def test_2000_random_schedules_are_valid(record_property: Callable[[str, object], None]) -> None:
    names = _all_valid(2000, 8, 32)
    assert set(names) == set(NAMES)
    record_property("valid schedules by generator", dict(names))


def test_200_broken_schedules_are_refused() -> None:
    kinds: Counter[str] = Counter()
    ranks, microbatches = (8, 24) if SOAK else (4, 6)
    for seed in range(200):
        change, schedule = broken(random.Random(seed), ranks=ranks, microbatches=microbatches)
        assert validate(schedule), f"seed {seed}: {change} of {schedule.name} was not seen"
        assert is_sound(schedule) != bool(_problems(schedule)), f"seed {seed}: {change} of {schedule.name}"
        kinds[change] += 1
    assert len(kinds) == 10 and min(kinds.values()) > 2


def test_what_is_wrong_is_said() -> None:
    made = generate("1f1b", ranks=2, microbatches=3)
    first, second = made.ranks
    assert validate(replace(made, ranks=(first[1:], second))) == [
        "rank 0: F of stage 0 is missing for micro-batch 0"
    ]
    late = (Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), *[a for a in first if a.microbatch])
    early = (*[a for a in second if a.kind is Kind.F], *[a for a in second if a.kind is Kind.B])
    assert validate(replace(made, ranks=(late, early))) == [
        "rank 0: 0B0 waits for ever for 1SEND_B0 of rank 1",
        "rank 1: 1F1 waits for ever for 0SEND_F1 of rank 0",
    ]
    with pytest.raises(ConfigError, match="cannot be run") as error:
        check(made, cap=1)
    assert "rank 0: keeps 2 activations at once; the cap is 1" in str(error.value)
    assert "rank 1" not in str(error.value)


def test_whole_backwards_wait_for_the_weight_gradients_before_them(tmp_path: Path) -> None:
    """Gradients of a weight are added in the order of the micro-batches: 0 before 1."""
    head = "1F0,1B0,1F1,1B1"
    (tmp_path / "kept.csv").write_text(f"0F0,0F1,0I0,0W0,0B1\n{head}\n")
    (tmp_path / "turned.csv").write_text(f"0F0,0F1,0I0,0B1,0W0\n{head}\n")
    (tmp_path / "apart.csv").write_text(f"0F0,0F1,0I0,0I1,0W0,0W1\n{head}\n")
    (tmp_path / "first.csv").write_text(f"0F0,0F1,0B0,0I1,0W1\n{head}\n")
    for name in ("kept", "apart", "first"):
        assert parse(str(tmp_path / f"{name}.csv")).problems(2, 1, 2) == []
    (told,) = parse(str(tmp_path / "turned.csv")).problems(2, 1, 2)
    assert "rank 0: 0W0 comes after 0B1; the weight gradients of a stage are added in the order" in told


def test_a_channel_that_is_too_small_is_seen() -> None:
    """Rank 1 sends the outputs of chunk 0 while rank 0 still runs chunk 0: breadth-first needs receives
    posted ahead."""
    made = lowered(generate("breadth_first", ranks=2, chunks=2, microbatches=6))
    assert validate(made, depth=1) == []
    late: list[tuple[Action, ...]] = []
    for actions in made.ranks:
        out: list[Action] = []
        for action in actions:
            if action.kind.computes:
                kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
                out += [action._replace(kind=kind)] if action._replace(kind=kind) in actions else []
            if action.kind not in (Kind.RECV_F, Kind.RECV_B):
                out.append(action)
        late.append(tuple(out))
    stuck = replace(made, ranks=tuple(late))
    problems = validate(stuck, depth=1)
    assert problems and all("waits for ever for room in the channel" in each for each in problems)
    assert validate(stuck, depth=5) == []


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 9, 32])
def test_depth_first_keeps_no_more_than_breadth_first(ranks: int, chunks: int, microbatches: int) -> None:
    sizes = {"ranks": ranks, "chunks": chunks, "microbatches": microbatches}
    deep, broad = (activation_peaks(generate(name, **sizes)) for name in ("depth_first", "breadth_first"))
    assert all(one <= other for one, other in zip(deep, broad, strict=True))
    assert microbatches == 1 or min(deep) < min(broad)
    assert set(broad) == {chunks * microbatches}
    if microbatches >= ranks:
        assert max(deep) == chunks * ranks  # As many as 1F1B keeps.


def test_a_schedule_that_cannot_be_run_is_not_timed() -> None:
    placement = Placement(2)
    turned = Schedule(
        "turned",
        placement,
        1,
        ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0))),
    )
    with pytest.raises(ConfigError, match="0B0 comes before 0F0"):
        Program(turned)
    late = Schedule(
        "late",
        placement,
        2,
        (
            tuple(Action(Kind(k), 0, int(m)) for k, m in ("F0", "B0", "F1", "B1")),
            tuple(Action(Kind(k), 1, int(m)) for k, m in ("F0", "F1", "B0", "B1")),
        ),
    )
    with pytest.raises(ConfigError, match="wait for each other"):
        Program(late)


@pytest.mark.parametrize("ranks", range(2, 6))
def test_an_interleaved_schedule_is_valid_or_refused_with_the_sizes_that_work(ranks: int) -> None:
    refused = 0
    for chunks, microbatches in itertools.product((2, 3), range(1, 13)):
        for group in (size for size in range(1, microbatches + 1) if microbatches % size == 0):
            sizes = {"ranks": ranks, "chunks": chunks, "microbatches": microbatches}
            try:
                assert not validate(generate("interleaved", group=group, **sizes))
            except ConfigError as error:
                refused += 1
                works = str(error).partition("expected one of ")[2].partition(", or depth_first")[0]
                for size in works.split(", ") if works != "none" else ():
                    assert not validate(generate("interleaved", group=int(size), **sizes))
    assert (refused > 0) == (ranks > 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "1f1b", "chunks": 2}, "2 chunks per rank with 1f1b"),
        ({"name": "2f2b"}, "expected one of 1f1b"),
        ({"name": "interleaved"}, "expected at least 2"),
        ({"name": "interleaved", "chunks": 2, "microbatches": 6}, "multiple of 4"),
        ({"name": "hybrid", "chunks": 2}, "group=K"),
        ({"name": "hybrid", "chunks": 2, "group": 9}, "expected 1 to 8"),
        ({"name": "breadth_first", "chunks": 2, "group": 4}, "leave it out"),
        ({"name": "zbv", "chunks": 3}, "expected 2"),
        ({"name": "dualpipev", "microbatches": 7}, "at least 8"),
        ({"name": "memory_capped"}, "cap=N"),
        ({"name": "memory_capped", "chunks": 3, "cap": 2}, "expected at least 3"),
        ({"name": "memory_capped", "cap": [3, 3]}, "caps of 2 ranks"),
        ({"name": "depth_first", "cap": 3}, "options of memory_capped"),
        ({"name": "depth_first", "ranks": 0}, "found 0 ranks"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(**{"ranks": 4, "microbatches": 8, **options})  # type: ignore[arg-type]
