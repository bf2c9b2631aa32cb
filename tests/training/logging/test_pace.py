"""When a line is due between reports, and what the last lines offer."""

from __future__ import annotations

from pathlib import Path

from mt_megatron.config.parse import load_config
from mt_megatron.training.logging.output import Pace
from mt_megatron.training.logging.summary import next_lines


def due(log_interval: int, *, first: int = 1, steps: int = 120, seconds: float = 1e-3) -> list[int]:
    clock = [0.0]
    pace = Pace(log_interval, now=lambda: clock[0])
    found = []
    for iteration in range(first, first + steps):
        clock[0] += seconds
        told = pace.due(iteration)
        if told:
            found.append(iteration)
        if told or iteration % log_interval == 0:
            pace.told()
    return found


def test_early_steps_of_each_process_are_told() -> None:
    assert due(100) == [1, 2, 5, 10, 20, 50]
    assert due(1000, first=501) == [501, 502, 505, 510, 520, 550, 600]
    assert due(1) == [] and due(3, steps=9) == [1, 2]


def test_nobody_waits_longer_than_half_a_minute() -> None:
    assert due(100, steps=100, seconds=8.0) == [
        1,
        2,
        5,
        9,
        10,
        14,
        18,
        20,
        *range(24, 48, 4),
        48,
        50,
        *range(54, 100, 4),
    ]


def test_only_what_can_be_done_is_offered() -> None:
    trained = load_config(["--save", "runs/a b", "--train-iters", "5"])
    assert next_lines(trained, 5, None, None) == []
    lines = next_lines(trained, 5, Path("runs/a b/iter_0000005"), Path("runs/a b/scan"))
    assert [line.split()[:2] for line in lines] == [
        ["trace:", "runs/a"],
        ["next:", "the"],
        ["next:", "mt-megatron"],
        ["next:", "mt-megatron"],
    ]
    assert "--from-megatron 'runs/a b' --to-hf" in lines[2] and "scan report 'runs/a b/scan'" in lines[3]
    assert "goes on from step 3" in next_lines(trained, 3, Path("x"), None)[0]


def test_the_next_command_does_what_its_line_says() -> None:
    """A given checkpoint is taken at every start; a run that made no step wrote none into ``--save``."""
    branch = load_config(["--save", "runs/b", "--train-iters", "5", "--resume", "runs/a/iter_0000002"])
    own, given = Path("runs/b/iter_0000003"), Path("runs/a/iter_0000007")
    assert next_lines(branch, 3, own, None)[0] == (
        "next: the same command with --resume auto goes on from step 3"
    )
    lines = next_lines(branch, 7, given, None)
    assert lines[0] == "next: the same command with --resume auto and a larger --train-iters trains on"
    assert "--from-megatron runs/a/iter_0000007 --to-hf" in lines[1]
    assert "--from-megatron runs/b --to-hf" in next_lines(branch, 3, own, None)[1]
