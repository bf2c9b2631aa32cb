"""The mixtures' launch scripts on real text: beyond unigrams, beside a dense model, experts in balance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulators import environment, needs_emulated_musa

ROOT = Path(__file__).resolve().parents[2]
NATS_BELOW_UNIGRAMS = 2.0
BESIDE_DENSE = 1.03

Record = Callable[[str, object], None]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(example, *flags, name=..., backend=...)``: the metrics of a launch script's run, each made once;
    all on the same data."""
    folder = tmp_path_factory.mktemp("mixtures")
    done: dict[str, list[dict[str, Any]]] = {}

    def get(example: str, *flags: str, name: str = "", backend: str = "cpu") -> list[dict[str, Any]]:
        name = name or f"{example}_{backend}"
        if name not in done:
            # Threads as the script chooses them, not as the tests do.
            kept = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
            emulated = environment() if backend == "musa" else {"PYTHONPATH": str(ROOT)}
            variables = {
                "PYTHON": sys.executable,
                "BACKEND": backend,
                "DATA_DIR": str(folder / "data"),
                "RUN_DIR": str(folder / name),
                "NPROC_PER_NODE": "2",
            }
            if backend == "musa":
                variables["MODEL"] = {"mixtral": "mixtral_tiny", "deepseekv3": "deepseekv3_tiny"}[example]
            script = ["bash", str(ROOT / "examples" / example / "dist_run_pretrain.sh"), *flags]
            result = subprocess.run(
                script, env={**kept, **emulated, **variables}, capture_output=True, text=True, timeout=5400
            )
            assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
            lines = (folder / name / "metrics.jsonl").read_text().splitlines()
            done[name] = [json.loads(line) for line in lines]
        return done[name]

    return get


def _check(run: Run, record: Record, found: list[dict[str, Any]]) -> None:
    end, dense = found[-1], run("llama3")[-1]
    record("validation loss", end["valid_loss"])
    record("dense validation loss", dense["valid_loss"])
    record("unigram", end["unigram"])
    record("seconds", end["seconds"])
    assert end["finished"] and end["consumed_tokens"] == dense["consumed_tokens"]
    assert end["valid_loss"] <= end["unigram"] - NATS_BELOW_UNIGRAMS
    assert end["valid_loss"] <= BESIDE_DENSE * dense["valid_loss"]


@pytest.mark.soak
@pytest.mark.parametrize("example", ["mixtral", "deepseekv3"])
def test_a_mixture_learns_as_a_dense_model_of_its_active_size(
    run: Run, record_property: Record, example: str
) -> None:
    _check(run, record_property, run(example))


@pytest.mark.soak
@needs_emulated_musa()
@pytest.mark.parametrize("example", ["mixtral", "deepseekv3"])
def test_it_learns_on_the_emulated_device(run: Run, record_property: Record, example: str) -> None:
    _check(run, record_property, run(example, backend="musa"))


@pytest.mark.soak
def test_the_expert_bias_brings_the_experts_into_balance(run: Run, record_property: Record) -> None:
    moved = _imbalance(run("deepseekv3"))
    unmoved = _imbalance(run("deepseekv3", "--moe-router-bias-update-rate", "0", name="unmoved"))
    for name, (first, last) in {"moved": moved, "unmoved": unmoved}.items():
        record_property(f"imbalance at first, bias {name}", round(first, 3))
        record_property(f"imbalance at last, bias {name}", round(last, 3))
    assert moved[1] < moved[0], "the bias is there to even out the load"
    # A negative control: without it the load stays as uneven as it was, or gets worse.
    assert unmoved[1] > 0.9 * unmoved[0]
    assert moved[1] - 1 < 0.5 * (unmoved[1] - 1)


def _imbalance(records: list[dict[str, Any]]) -> tuple[float, float]:
    """Tokens of the busiest expert over the mean, over the first tenth of the run and over the last."""
    values = [each["moe_imbalance"] for each in records if each["event"] == "train"]
    tenth = max(1, len(values) // 10)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth
