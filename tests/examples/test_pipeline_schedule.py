"""The launch scripts with a pipeline: ``auto`` trains as Megatron-Core's own schedule does, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.pipeline.policy.decision_log import FILE, records
from tests.second_lane import DAILY

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--train-iters", str(STEPS), "--log-interval", "1"),
    *("--eval-iters", "0", "--micro-batch-size", "1", "--global-batch-size", "8", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--lr-warmup-iters", "2", "--num-workers", "0"),
    *("--scan", "off", "--scope", "off"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--exit-interval", str(STEPS)),
)


def launched(folder: str, run: Path, schedule: str | None, *more: str, dry: bool = False) -> str:
    """Output of the launch script of ``folder`` that trains in ``run``."""
    environment = {name: value for name, value in os.environ.items() if name != "PIPELINE_SCHEDULE"}
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment.update(
        PYTHON=sys.executable,
        PYTHONPATH=path,
        OMP_NUM_THREADS="1",
        BACKEND="cpu",
        CORPUS=str(run.parent / "corpus"),
        DATA_DIR=str(run.parent / "data"),
        RUN_DIR=str(run),
        VOCAB_SIZE="300",
    )
    if schedule is not None:
        environment["PIPELINE_SCHEDULE"] = schedule
    done = subprocess.run(
        [
            "bash",
            str(ROOT / "examples" / folder / "dist_run_pretrain.sh"),
            *["--dry-run"] * dry,
            *FLAGS,
            *more,
        ],
        cwd=run.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def steps(run: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(r["iteration"], r["loss"], r["grad_norm"]) for r in lines if r["event"] == "train"]


@pytest.mark.daily
@pytest.mark.parametrize("folder", ["llama3", "deepseekv3"])
def test_auto_trains_as_1f1b_does(folder: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for i in range(60):
        lines = (f"entry {i} of {j}: {(i * 37 + j * 11) % 101} and {(i + j) % 7}\n" for j in range(120))
        (tmp_path / "corpus" / f"d{i:02d}.txt").write_text("".join(lines))
    for schedule in ("1f1b", "auto"):
        launched(folder, tmp_path / schedule, schedule)
    expected = steps(tmp_path / "1f1b")
    assert [step for step, _, _ in expected] == list(range(1, STEPS + 1))
    assert steps(tmp_path / "auto") == expected
    kinds = [each["record"] for each in records(tmp_path / "auto" / FILE)]
    assert kinds.count("decision") >= 1
    assert not (tmp_path / "1f1b" / FILE).exists()


def test_auto_is_the_default_where_there_is_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    run = launched("llama3", tmp_path / "run", None, dry=True).splitlines()[-1]
    words = run[run.index("--pipeline-model-parallel-size") :].split()
    assert "--pipeline-schedule auto_if_pipeline" in run
    for stages, name in (("2", "auto"), ("1", None)):
        flags = ["--pipeline-schedule", "auto_if_pipeline", *words, "--pipeline-model-parallel-size", stages]
        choice = load_config(["--model", "llama3_tiny", *flags]).schedule_choice
        assert (None if choice is None else choice.name) == name
    if DAILY:
        own = launched("llama3", tmp_path / "run", "1f1b", dry=True)
        assert "--pipeline-schedule 1f1b" in own and "auto_if_pipeline" not in own
    given = launched("llama3", tmp_path / "run", "1f1b", "--pipeline-schedule", "zb_h1", dry=True)
    assert given.count("--pipeline-schedule") == 1 and "--pipeline-schedule zb_h1" in given
