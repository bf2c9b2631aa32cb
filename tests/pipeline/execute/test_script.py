"""A script with no word of us, started by ``mt-megatron run --pipeline-schedule``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, run_command

SCRIPT = Path(__file__).parent / "scripts" / "two_stages.py"


def run(folder: Path, options: list[str], *arguments: str, ranks: int = 2) -> tuple[int, str, list[float]]:
    """Exit code, what was written to stderr, and the losses of all micro-batches of three steps."""
    out = folder / "losses.json"
    out.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = run_command(
        [sys.executable, *launcher, "-m", "mt_megatron.cli", "run", "--backend", "cpu", *options, "--"]
        + [str(SCRIPT), str(out), *arguments],
        env=environment,
        cwd=folder,
        timeout=120,
    )
    return done.returncode, done.stderr, json.loads(out.read_text()) if out.exists() else []


@pytest.mark.daily
def test_the_same_losses_as_without(tmp_path: Path) -> None:
    code, said, expected = run(tmp_path, [])
    assert code == 0 and len(expected) == 3 * 4, said[-3000:]
    for name in ("breadth_first", "zb_h1", "interleaved"):
        code, said, losses = run(tmp_path, ["--pipeline-schedule", name])
        assert code == 0 and losses == expected, (name, said[-3000:])


@pytest.mark.daily
def test_a_v_trains(tmp_path: Path) -> None:
    """The first rank has the losses; layers are built elsewhere, from other seeds."""
    code, said, losses = run(tmp_path, ["--pipeline-schedule", "zbv"])
    assert code == 0 and len(losses) == 3 * 4, said[-3000:]
    assert 3.3 < losses[0] < 3.7


@pytest.mark.daily
def test_a_script_without_a_pipeline_is_told(tmp_path: Path) -> None:
    code, said, _ = run(tmp_path, ["--pipeline-schedule", "zb_h1"], "one", ranks=1)
    assert code != 0 and "zb_h1 with pipeline_model_parallel_size 1; expected a size above 1" in said


def test_an_unknown_schedule_starts_nothing(tmp_path: Path) -> None:
    done = run_command(
        [
            sys.executable,
            "-m",
            "mt_megatron.cli",
            "run",
            "--pipeline-schedule",
            "zb_h2",
            "--",
            str(SCRIPT),
            "x",
        ],
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 2 and "Did you mean zb_h1?" in done.stderr
