"""What a run says: JSON records and the progress display."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.training.metrics import Display, Metrics, duration, format_step, perplexity

VALUES = {
    "loss": 3.14159,
    "lr": 2e-3,
    "grad_norm": 1.25,
    "tokens_per_second": 12345.6,
    "step_seconds": 0.5,
    "skipped_iterations": 0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_records_are_one_json_object_per_line_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    for iteration in (1, 2):
        metrics = Metrics(path)
        metrics.record("train", iteration, {"loss": float(iteration)})
        metrics.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["event"], r["iteration"], r["loss"]) for r in records] == [
        ("train", 1, 1.0),
        ("train", 2, 2.0),
    ]


def test_a_record_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.record("train", 1, {})
    assert (tmp_path / "m.jsonl").read_text().endswith("\n")
    metrics.close()


def test_not_a_number_becomes_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.record("train", 1, {"loss": float("nan"), "norm": float("inf")})
    metrics.close()
    record = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert record["loss"] is None and record["norm"] is None


def test_an_unwritable_path_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="metrics-path"):
        Metrics(tmp_path / "file" / "metrics.jsonl")


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    display = Display(100, enabled=True, stream=stream)
    display.step(1, VALUES)
    display.step(2, VALUES)
    display.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\r" not in stream.getvalue()
    assert lines[0].startswith(
        "step   1/100  loss 3.1416  lr 0.002  grad norm 1.250  12,346 tokens/s  0:50 left"
    )


def test_on_a_terminal_steps_overwrite_and_lines_stay() -> None:
    stream = Terminal()
    display = Display(100, enabled=True, stream=stream)
    display.step(1, VALUES)
    display.step(2, VALUES)
    display.say("checkpoint")
    display.close()
    shown = [part.split("\r")[-1].strip() for part in stream.getvalue().split("\n")]
    assert shown == ["checkpoint", ""]
    assert stream.getvalue().count("step ") == 2


def test_other_ranks_say_nothing() -> None:
    stream = io.StringIO()
    display = Display(100, enabled=False, stream=stream)
    display.step(1, VALUES)
    display.say("x")
    display.close()
    assert stream.getvalue() == ""


def test_skipped_steps_and_missing_norm_are_shown() -> None:
    line = format_step(1, 10, {**VALUES, "grad_norm": None, "skipped_iterations": 3})
    assert "grad norm -" in line and line.endswith("3 skipped")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_perplexity_does_not_overflow() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == float("inf")
