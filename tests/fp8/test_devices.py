"""Recipes on the emulated musa device, and every launch script with every recipe that a device computes."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.fp8.recipe import PRESETS, possible_recipes
from mt_megatron.training.logging.metrics import read_records
from tests.emulators import environment, needs_emulated_musa
from tests.launch import ROOT, run_ranks

CASES = "tests.fp8.cases"
MUSA = possible_recipes("musa", ("tensor", "row"))
FOLDERS = ("llama3", "mixtral", "deepseekv3", "qwen3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("devices"))
    layouts = {name: f"--fp8-recipe {name}" for name in PRESETS}
    [host] = run_ranks(1, f"{CASES}:trained", folder, layouts, 3, timeout=150)
    variables = {**environment("3.1"), "MT_MEGATRON_TEST_BACKEND": "musa"}
    [emulated] = run_ranks(1, f"{CASES}:trained", folder, layouts, 3, timeout=150, env=variables)
    return host, emulated


@needs_emulated_musa()
@pytest.mark.daily
@pytest.mark.parametrize("name", PRESETS)
def test_emulated_musa_computes_what_it_has_kernels_for_and_refuses_the_rest(
    runs: tuple[dict[str, Any], dict[str, Any]], name: str
) -> None:
    host, emulated = (found[name] for found in runs)
    if name in MUSA:
        assert emulated["losses"] == pytest.approx(host["losses"], rel=2e-3)
    else:
        assert f"fp8_recipe {name} is not possible on this musa device" in emulated["error"]
        assert "delayed, tensorwise, rowwise, rowwise_gw_hp here" in emulated["error"]


PAIRS = [("cpu", name) for name in PRESETS] + [
    pytest.param("musa", name, marks=needs_emulated_musa()) for name in MUSA
]


@pytest.mark.soak
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_every_launch_script_with_every_recipe(tmp_path: Path, folder: str, backend: str, name: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index, path in enumerate(sorted((ROOT / "docs").glob("*.md"))):
        (corpus / f"{index}.txt").write_text(path.read_text())
    tiny = min((ROOT / "examples" / folder).glob("*_tiny.yaml")).stem
    words = "--train-iters 20 --lr-warmup-iters 5 --log-interval 10 --eval-iters 0 --scan off --seq-length 64"
    words += " --max-position-embeddings 64 --scope off --cpu-bf16-products fp32"
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / folder / "dist_run_pretrain.sh"), *words.split()],
        env={
            **os.environ,
            **(environment("3.1") if backend == "musa" else {}),
            "FP8": name,
            "BACKEND": backend,
            "MODEL": tiny,
            "CORPUS": str(corpus),
            "VOCAB_SIZE": "300",
            "DATA_DIR": str(tmp_path / "data"),
            "RUN_DIR": str(tmp_path / "run"),
            "NPROC_PER_NODE": "2" if backend == "cpu" else "1",
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    records = [each for each in read_records(tmp_path / "run" / "metrics.jsonl") if each["event"] == "train"]
    assert records[-1]["iteration"] == 20 and all(math.isfinite(each["loss"]) for each in records)
