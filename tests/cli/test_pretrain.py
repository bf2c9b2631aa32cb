"""``mt-megatron pretrain`` as a user meets it: wrong use, what it prints, under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mt_megatron.cli.main import main
from mt_megatron.cli.pretrain import COMMON
from mt_megatron.config import presets
from mt_megatron.config.types import options
from tests.launch import ROOT, run_command
from tests.training.loop_cases import MODEL, TRAINING


def command(
    *words: str, launcher: tuple[str, ...] = (), timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, outside of any group of processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    return run_command(
        [sys.executable, *launcher, "-m", "mt_megatron.cli", "pretrain", *words],
        env=environment,
        timeout=timeout,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing says what to train"),
        (("--num-layer", "4"), "Did you mean --num-layers"),
        (("--model", "llama3_tiny"), "the configuration has"),
        (("--model", "llama3_tiny", "--mock-data", "--backend", "tpu"), "installed are cpu, cuda, musa\n"),
        (("--model", "llama3_tiny", "--mock-data", "--backend", "cpuu"), "did you mean 'cpu'?\n"),
    ],
)
def test_wrong_use_is_said_without_a_traceback(words: tuple[str, ...], message: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_options_and_configuration_are_printed() -> None:
    everything = command("--list-options")
    assert everything.returncode == 0 and "--tensor-model-parallel-size" in everything.stdout
    some = command("--list-options", "warmup")
    assert some.returncode == 0 and len(some.stdout.splitlines()) < 20 and "--lr-warmup-iters" in some.stdout
    none = command("--list-options", "warmupp")
    assert none.returncode == 2 and "Traceback" not in none.stderr
    shown = {each[2:].replace("-", "_") for each in re.findall(r"--[a-z][a-z0-9-]*", COMMON)}
    assert shown - {"model", "config"} <= {*options()}
    assert COMMON.splitlines()[1] in command("--help").stdout
    printed = command("--model", "llama3_tiny", "--lr", "1e-3", "--print-config")
    assert printed.returncode == 0
    assert yaml.safe_load(printed.stdout)["optimizer"]["lr"] == 1e-3


def test_trains_under_torchrun_and_says_where_everything_is(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-endpoint", "127.0.0.1:0")
    flags = (
        f"{MODEL} {TRAINING} --hidden-dropout 0 --attention-dropout 0 --bf16 --use-distributed-optimizer "
        f"--save {tmp_path}/saved --metrics-path {tmp_path}/metrics.jsonl"
    )
    done = command(*flags.split(), launcher=(*launcher, "--rdzv-backend", "c10d"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") and "tokens/s" in line for line in lines) == 6
    assert any("2 processes" in line and "data 2" in line for line in lines)
    assert re.search(r"validation cross-entropy \d+\.\d{4} nats per token, perplexity", done.stdout)
    assert f"checkpoint: {tmp_path}/saved/iter_0000006" in lines
    assert f"metrics: {tmp_path}/metrics.jsonl" in lines
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["event"] for r in records] == ["start", *["train"] * 6, "checkpoint", "valid", "end"]
    manifest = json.loads((tmp_path / "saved" / "iter_0000006" / "mt_megatron.json").read_text())
    assert manifest["progress"]["consumed_samples"] == 48
    assert manifest["config"]["train"]["bf16"] is True
    assert manifest["patches"]["backend"] == "cpu" and manifest["patches"]["patches"]
    assert "Warning" not in done.stderr, done.stderr


def test_models_are_listed_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "--list-models"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == presets.names()
    assert "llama3_8b         Llama 3 8B, released 2024-04-18" in lines
