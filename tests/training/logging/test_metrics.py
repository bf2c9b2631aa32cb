"""What a run says: its JSON records."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError
from mt_megatron.training.logging.metrics import Metrics, perplexity, run_name
from mt_megatron.training.logging.quantities import duration
from tests.launch import ROOT
from tests.locks import locked_by_another


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


HOLDS = """
import sys
from pathlib import Path
from mt_megatron.training.logging.metrics import Metrics
metrics = [Metrics(Path(each)) for each in sys.argv[1:]]
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time_writes_to_a_file(tmp_path: Path) -> None:
    path, device = tmp_path / "m.jsonl", Path(os.devnull)
    command = [sys.executable, "-W", "ignore", "-c", HOLDS, str(path), str(device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"another run writes its records to {path}; .*metrics-path"):
            Metrics(path)
        Metrics(device).close()
    # It ended, without closing anything. A run of this process that failed does not hinder the next.
    first, second = Metrics(path), Metrics(path)
    second.record("train", 1, {})
    second.close()
    assert len(path.read_text().splitlines()) == 1
    # Once nobody has these objects another process may, and then this one may not.
    del first, second
    with locked_by_another(path), pytest.raises(ConfigError):
        Metrics(path)


def test_storage_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    metrics = Metrics(tmp_path / "m.jsonl")
    assert metrics.unlocked == "No locks available"
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


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_perplexity_does_not_overflow() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == float("inf")


@pytest.mark.parametrize(
    "flags,name",
    [
        ("--save runs/llama/checkpoints --metrics-path runs/llama/metrics.jsonl", "llama"),
        ("--save runs/first", "first"),
        ("", None),
    ],
)
def test_a_run_is_named_after_its_folder(flags: str, name: str | None) -> None:
    """Not after that of its checkpoints, which every launch script calls alike."""
    assert run_name(load_config(["--model", "llama3_tiny", *flags.split()])) == name
