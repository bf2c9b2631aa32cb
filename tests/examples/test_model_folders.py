"""The folders beside Llama's: valid files, true tables, scripts that show what they do."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples import layout_tables
from mt_megatron.config import presets
from mt_megatron.config.parse import load_config
from mt_megatron.planning.build import model_shape
from mt_megatron.planning.memory_estimate import memory_of
from mt_megatron.planning.parameters import count_parameters
from mt_megatron.training.validate import problems

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "mixtral": {"mixtral_tiny": 2, "mixtral_8x7b": 64, "mixtral_8x22b": 64},
    "deepseekv3": {"deepseekv3_tiny": 2, "deepseek_v2_lite": 8, "deepseek_v2": 512, "deepseek_v3": 512},
    "qwen3": {
        "qwen3_tiny": 2,
        "qwen3_moe_tiny": 2,
        "qwen3_0.6b": 8,
        "qwen3_8b": 8,
        "qwen3_32b": 64,
        "qwen3_30b_a3b": 64,
        "qwen3_235b_a22b": 512,
        "qwen2.5_0.5b": 8,
        "qwen2.5_7b": 8,
        "qwen2.5_72b": 64,
    },
    "bert": {"bert_tiny": 2, "bert_336m": 8, "bert_1.3b": 64, "bert_3.9b": 64},
}
"""As few processes as the layout in each file needs."""

FILES = [(folder, name, size) for folder, names in FOLDERS.items() for name, size in names.items()]
ON_CPU = {
    "mixtral": "mixtral_tiny",
    "deepseekv3": "deepseekv3_tiny",
    "qwen3": "qwen3_moe_tiny",
    "bert": "bert_tiny",
}
TINY = (*ON_CPU.values(), "qwen3_tiny")
VARIABLES = ("BACKEND", "MODEL", "CORPUS", "VOCAB_SIZE", "MAX_TOKENS", "DATA_DIR", "RUN_DIR", "NNODES")


def shown(folder: str, *arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return subprocess.run(
        ["bash", str(ROOT / "examples" / folder / "dist_run_pretrain.sh"), "--dry-run", *arguments],
        cwd=cwd,
        env={**environment, "PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(("folder", "name", "size"), FILES, ids=[name for _, name, _ in FILES])
def test_every_model_file_is_a_valid_configuration(folder: str, name: str, size: int) -> None:
    file = ROOT / "examples" / folder / f"{name}.yaml"
    config = load_config([], file)
    assert config.model.preset == name
    assert problems(config, world_size=size, check_files=False) == []
    stated = re.search(r"not measured: (\d+) GiB", file.read_text())
    assert (stated is None) == (name in TINY)
    if stated:
        assert int(stated[1]) == round(memory_of(config, size).worst.total / 2**30) < 80


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_model_file_is_tested_and_named(folder: str) -> None:
    files = {file.stem for file in (ROOT / "examples" / folder).glob("*.yaml")}
    assert files == set(FOLDERS[folder])
    readme = (ROOT / "examples" / folder / "README.md").read_text()
    for name in files:
        assert f"`{name}.yaml`" in readme
        count = count_parameters(model_shape(load_config(["--model", name, *_vocabulary(name)])))
        assert f"{count.total:,}" in readme and f"{count.active:,}" in readme
        # A run prints what it trains.
        assert f"{count.trained:,}" in readme or name not in TINY


def test_every_preset_has_a_file() -> None:
    files = {file.stem for file in (ROOT / "examples").glob("*/*.yaml")}
    # Llama's 8B of 3.1 is the 8B of 3 in size and layout.
    assert set(presets.names()) - {"llama3.1_405b", "llama3.1_8b"} <= files


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_tables_of_layouts_are_what_plan_computes(folder: str) -> None:
    path = ROOT / "examples" / folder
    text = layout_tables.written(path)
    assert text == (path / "README.md").read_text(encoding="utf-8"), "run python examples/layout_tables.py"
    devices = set(re.findall(r"^\| ([\d,]+) \|", text, flags=re.MULTILINE))
    assert devices == {"8", "64", "512", "2,048"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_layouts_of_the_tables_pass_the_checks_of_a_run(folder: str) -> None:
    entries = yaml.safe_load((ROOT / "examples" / "layouts" / f"{folder}.yaml").read_text())
    for model, entry in entries.items():
        batch = ["--global-batch-size", str(entry["global_batch_size"]), "--train-iters", "1"]
        for devices, options in entry["layouts"].items():
            config = load_config(["--model", model, *batch, *options.split()])
            assert problems(config, world_size=devices, check_files=False) == [], (model, devices)


def test_the_tables_would_notice_another_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "examples" / "mixtral"
    monkeypatch.setattr(layout_tables, "_GIB", 2**30 * 1.01)
    assert layout_tables.written(path) != (path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TINY)
def test_the_small_models_have_five_million_active_parameters(name: str) -> None:
    config = load_config(["--model", name, "--vocab-size", "4096"])
    count = count_parameters(model_shape(config))
    assert 4.7e6 < count.active < 5.3e6 and config.train.seq_length == 256


def test_the_small_deepseek_has_all_that_v3_has() -> None:
    small, large = (load_config(["--model", name]).model for name in ("deepseekv3_tiny", "deepseek_v3"))
    for name in ("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_dtype"):
        assert getattr(small, name) == getattr(large, name)
    for name in ("q_lora_rank", "moe_router_num_groups", "mtp_num_layers", "multi_latent_attention"):
        assert getattr(small, name) and getattr(large, name)
    for model in (small, large):
        assert model.moe_layer_freq[0] == 0 and model.moe_layer_freq[-1] == 1
        assert model.rope_type == "yarn" and model.moe_shared_expert_intermediate_size


@pytest.mark.parametrize("folder", FOLDERS)
def test_dry_run_shows_the_command_and_changes_nothing(folder: str, tmp_path: Path) -> None:
    done = shown(folder, "--lr", "1e-3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    prepare, run = done.stdout.splitlines()
    assert "mt_megatron.cli prepare --output" in prepare
    assert f"examples/{folder}/{ON_CPU[folder]}.yaml" in run and run.rstrip().endswith("--lr 1e-3")
    assert "-m mt_megatron.cli launch --gpus-per-node 2 -- --config" in run


@pytest.mark.parametrize(
    ("folder", "name"), [("mixtral", "mixtral_8x22b"), ("deepseekv3", "deepseek_v3"), ("qwen3", "qwen3_tiny")]
)
def test_another_model_can_be_chosen(folder: str, name: str, tmp_path: Path) -> None:
    done = shown(folder, "--mock-data", MODEL=name, BACKEND="cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = done.stdout.splitlines()
    config = next(word for word in shlex.split(run) if word.endswith(".yaml"))
    assert Path(config) == ROOT / "examples" / folder / f"{name}.yaml"


def test_the_scripts_are_clean() -> None:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed; the extra dev brings it")
    scripts = [f"examples/{folder}/dist_run_pretrain.sh" for folder in FOLDERS]
    done = subprocess.run([found, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_model_of_another_folder_is_refused(tmp_path: Path) -> None:
    done = shown("mixtral", MODEL="deepseek_v3", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected one of: mixtral_8x22b mixtral_8x7b mixtral_tiny" in done.stderr


def _vocabulary(name: str) -> list[str]:
    return ["--vocab-size", "4096"] if name in TINY else []
