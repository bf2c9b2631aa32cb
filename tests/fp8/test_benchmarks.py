"""FP8's benchmarks run from end to end at toy size: those for devices too, on the CPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from mt_megatron.fp8.recipe import PRESETS
from tests.launch import ROOT, run_command

SCRIPTS = {
    "fp8_gemm.py": "--backend cpu --toy",
    "fp8_linear.py": "--backend cpu --toy",
    "fp8_step.py": "--backend cpu --toy --record RECORD",
    "fp8/loss_gap.py": "--toy --sides fp32 bf16 nvfp4 control --out RECORD/gap.jsonl",
    "fp8/telemetry_cost.py": "--toy --record RECORD",
}


@pytest.mark.daily
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs(tmp_path: Path, script: str) -> None:
    words = SCRIPTS[script].replace("RECORD", str(tmp_path)).split()
    done = run_command(
        [sys.executable, str(ROOT / "benchmarks" / script), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if script.startswith("fp8_"):
        said = {name for name in PRESETS if re.search(rf"\b{name}\b", done.stdout)}
        assert said == set(PRESETS), done.stdout
    assert "nan" not in done.stdout.lower()
    assert ("--record" not in words) or len(list(tmp_path.glob("*.json"))) == 1
