"""The launch script: what it shows, what it refuses, and one real run that trains, resumes and ends."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.seams.widened import serves_processor
from mt_megatron.training.validate import problems
from tests.launch import run_command
from tests.second_lane import DAILY

ROOT = Path(__file__).resolve().parents[2]
LLAMA3 = ROOT / "examples" / "llama3"
SHELL_FILES = (
    "examples/launch_common.sh",
    "examples/llama3/dist_run_pretrain.sh",
    "tests/run.sh",
    ".ci/run",
)
# As few processes as the layout in the file needs.
WORLD_SIZES = {"llama3_tiny": 2, "llama3_8b": 8, "llama3_70b": 32, "llama3_405b": 288}
VARIABLES = (
    *("BACKEND", "MODEL", "CORPUS", "VOCAB_SIZE", "MAX_TOKENS", "DATA_DIR", "RUN_DIR"),
    *("P2P_TRANSPORT", "NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)


# auto imports torch before it says cpu, which takes seconds: in the first lane one dry run does.
CHOSEN = {} if DAILY else {"BACKEND": "cpu"}


def _environment(**changes: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    # Also where the package is not installed: the script looks from another folder than the checkout.
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return {**environment, **CHOSEN, **changes}


def _launch(
    *arguments: str, root: Path = ROOT, cwd: Path | None = None, timeout: float = 60, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(root / "examples" / "llama3" / "dist_run_pretrain.sh"), *arguments],
        cwd=cwd,
        env=_environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The examples under a path with blanks, where nothing was ever run."""
    root = tmp_path / "a path with blanks"
    shutil.copytree(ROOT / "examples", root / "examples")
    return root


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("my corpus")
    for i in range(60):
        lines = (f"entry {i} of {j}: {(i * 37 + j * 11) % 101} and {(i + j) % 7}\n" for j in range(120))
        (folder / f"d{i:02d}.txt").write_text("".join(lines))
    return folder


def test_shell_files_are_clean() -> None:
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; the extra dev brings it")
    found = subprocess.run([shellcheck, "-x", *SHELL_FILES], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", sorted(WORLD_SIZES))
def test_every_model_file_is_a_valid_configuration(name: str) -> None:
    config = load_config([], LLAMA3 / f"{name}.yaml")
    assert problems(config, world_size=WORLD_SIZES[name], check_files=False) == []


def test_every_model_file_is_tested() -> None:
    assert {file.stem for file in LLAMA3.glob("*.yaml")} == set(WORLD_SIZES)


def test_dry_run_shows_the_command_and_changes_nothing(checkout: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    shown = _launch("--dry-run", "--lr", "1e-3", root=checkout, cwd=tmp_path, BACKEND="auto")
    assert shown.returncode == 0, shown.stderr
    assert sorted(tmp_path.rglob("*")) == before
    prepare, run = shown.stdout.splitlines()
    assert "mt_megatron.cli prepare --output" in prepare
    assert "-m mt_megatron.cli launch --gpus-per-node 2 -- --config" in run
    assert run.startswith("env OMP_NUM_THREADS=1 ")
    assert "--p2p-transport auto" in run
    assert "llama3_tiny.yaml" in run and run.rstrip().endswith("--lr 1e-3")
    assert str(checkout).replace(" ", "\\ ") in run, "blanks are quoted: the line can be pasted"


_PLAIN = "processor\t: 0\nflags\t\t: fpu sse2 avx2"
CPUS = {
    "avx2": (f"{_PLAIN} fma\nvmx flags\t: avx512bw\n", {}, True),
    "avx512": (f"{_PLAIN} avx512f avx512dq avx512bw avx512vl\nbugs\t\t:\n", {}, False),
    "avx512 without bw": (f"{_PLAIN} avx512f avx512er\n", {}, True),
    "amx": (f"{_PLAIN} avx512f avx512bw amx_bf16 amx_tile\n", {}, False),
    "avx512 capped": (f"{_PLAIN} avx512f avx512bw\n", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, True),
    "avx512 capped above": (f"{_PLAIN} avx512bw\n", {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}, True),
    "e-cores capped above": (f"{_PLAIN} avx_ne_convert\n", {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}, False),
    "avx512 not capped": (f"{_PLAIN} avx512bw\n", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False),
    "e-cores": (f"{_PLAIN} avx_vnni avx_ne_convert\n", {}, False),
    "arm64": ("processor\t: 0\nFeatures\t: fp asimd bf16\n", {}, False),
    "power": ("processor\t: 0\ncpu\t\t: POWER9\n", {}, False),
    "no flags": ("", {}, False),
    "no /proc": (None, {}, False),
    "fp8": (f"{_PLAIN}\n", {"FP8": "delayed"}, False),
    "cuda": (f"{_PLAIN}\n", {"BACKEND": "cuda"}, False),
}


@pytest.mark.parametrize("name", CPUS)
def test_bf16_is_slow_on_x86_without_its_kernels_alone(name: str, tmp_path: Path) -> None:
    text, changes, slow = CPUS[name]
    cpuinfo = tmp_path / "cpu info"
    if text is not None:
        cpuinfo.write_text(text)
    assert _judged(cpuinfo, **changes) == ("slow" if slow else "fast")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors are not judged")
def test_bf16_is_slow_where_torch_has_no_kernels() -> None:
    limits = {name: value for name, value in os.environ.items() if name == "ONEDNN_MAX_CPU_ISA"}
    assert _judged(Path("/proc/cpuinfo"), **limits) == ("slow" if serves_processor() else "fast")


def _judged(cpuinfo: Path, **changes: str) -> str:
    # As in a launch script: any command that fails where that is not looked at ends it.
    program = 'set -euo pipefail; source "$0"; if bf16_is_slow "$1"; then echo slow; else echo fast; fi'
    found = subprocess.run(
        ["bash", "-c", program, str(ROOT / "examples" / "launch_common.sh"), str(cpuinfo)],
        env={"PATH": os.environ["PATH"], "BACKEND": "cpu", **changes},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert found.stderr == ""
    return found.stdout.strip()


def test_precision_is_changed_on_one_node_alone() -> None:
    """Several nodes may have several processors, each of which would be judged by its own script."""
    nodes = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "node0"}
    for changes, changed in (({}, serves_processor()), (nodes, False)):
        shown = _launch("--dry-run", BACKEND="cpu", **changes)
        assert shown.returncode == 0, shown.stderr
        assert ("--no-bf16" in shown.stdout) == changed
        assert ("without which bf16 takes" in shown.stderr) == serves_processor()


def test_dry_run_without_an_environment_shows_how_it_would_be_made(checkout: Path, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    # An interpreter that has nothing installed: the base of this one, isolated.
    bare.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -I -S "$@"\n')  # type: ignore[attr-defined]
    bare.chmod(0o755)
    shown = _launch("--dry-run", root=checkout, PYTHON=str(bare), TORCH_SPEC="torch==2.7.0")
    assert shown.returncode == 0, shown.stderr
    venv, torch, package, prepare, run = shown.stdout.splitlines()
    assert "-m venv" in venv and "pip install" in torch and "torch==2.7.0" in torch
    assert package.rstrip().endswith(str(checkout).replace(" ", "\\ ") + "\\[scan\\,scope\\]")
    assert all("/.venv/bin/python" in line for line in (prepare, run))
    assert not (checkout / ".venv").exists()


def test_variables_reach_the_command(tmp_path: Path, corpus: Path) -> None:
    shown = _launch(
        "--dry-run",
        MODEL="llama3_8b",
        NNODES="2",
        NODE_RANK="1",
        MASTER_ADDR="10.0.0.1",
        NPROC_PER_NODE="4",
        CORPUS=str(corpus),
        MAX_TOKENS="5000",
        RUN_DIR=str(tmp_path / "run"),
        P2P_TRANSPORT="collective",
    )
    assert shown.returncode == 0, shown.stderr
    prepare, run = shown.stdout.splitlines()
    assert "--corpus" in prepare and "--max-tokens 5000" in prepare
    assert "--gpus-per-node 4 --nodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 -- " in run
    assert "--p2p-transport collective" in run
    assert "llama3_8b.yaml" in run and f"--save {tmp_path}/run/checkpoints" in run


def test_a_runs_folder_follows_its_corpus(corpus: Path, tmp_path: Path) -> None:
    """In one folder for all, a second corpus would continue the first one's run."""
    folders = []
    for changes in ({}, {"CORPUS": str(corpus)}, {"DATA_DIR": str(tmp_path / "made")}):
        words = shlex.split(_launch("--dry-run", **changes).stdout.splitlines()[-1])
        folders.append(Path(words[words.index("--save") + 1]).parent.name)
    assert folders == ["llama3_tiny", f"llama3_tiny-{corpus.name}", "llama3_tiny-made"]


def test_advice_about_data_is_in_words_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('[{"text": "a"}]')
    shown = _launch(CORPUS=str(tmp_path / "c.json"), DATA_DIR=str(tmp_path / "made"))
    assert shown.returncode == 1 and "jq -c '.[]'" in shown.stderr
    assert f"--corpus is CORPUS={tmp_path}/c.json, --output DATA_DIR={tmp_path}/made" in shown.stderr


def test_a_corpus_that_is_not_there_is_wrong_use(tmp_path: Path) -> None:
    shown = _launch(CORPUS=str(tmp_path / "nowhere"), DATA_DIR=str(tmp_path / "made"))
    assert shown.returncode == 2 and f"--corpus {tmp_path}/nowhere: there is nothing" in shown.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--epochs 3", "epochs"),
        ("--lr fast", "--lr"),
        ("--tensor-model-parallel-size 3", "tensor_model_parallel_size"),
        ("--num-layers 0", "num_layers"),
    ],
)
def test_options_are_checked_before_data_is_made(tmp_path: Path, corpus: Path, words: str, says: str) -> None:
    """Set-up and data take minutes."""
    shown = _launch(*words.split(), **_places(tmp_path, corpus))
    assert shown.returncode == 2 and says in shown.stderr, shown.stderr
    assert list(tmp_path.iterdir()) == []
    if says == "epochs":
        assert _launch("--dry-run", *words.split()).returncode == 2


def test_named_data_and_folders_replace_the_scripts_own(tmp_path: Path) -> None:
    shown = _launch("--dry-run", "--train-data-path", "mine/train", "--save=elsewhere", MAX_RESTARTS="3")
    (run,) = shown.stdout.splitlines()
    assert "--max-restarts 3 -- --config" in run
    assert run.count("--train-data-path") == 1 and "mine/train" in run
    assert run.count("--save") == 1 and "elsewhere" in run


OWN_DATA = """
model: {preset: llama3_tiny}
data:
  train_data_path: mine/train
checkpoint: {save: mine/checkpoints}
"""
PRINTED = """
model: {preset: llama3_tiny}
parallel:
  p2p-transport: collective
data:
  data_path: null
  train_data_path: null
  mock_data: false
"""


def test_a_file_of_ones_own_takes_the_place_of_the_familys(tmp_path: Path) -> None:
    (tmp_path / "my model.yaml").write_text(OWN_DATA)
    shown = _launch("--dry-run", "--config", "my model.yaml", "--lr", "1e-3", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (run,) = shown.stdout.splitlines()
    words = shlex.split(run)
    assert words.count("--config") == 1 and words[words.index("--config") + 1] == "my model.yaml"
    assert not {"--train-data-path", "--tokenizer-model", "--save"} & set(words), "the file says these"
    assert words[words.index("--metrics-path") + 1] == str(ROOT / "runs" / "my model" / "metrics.jsonl")
    assert words[-2:] == ["--lr", "1e-3"] and "names no data" not in shown.stderr


def test_a_file_without_data_gets_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(PRINTED)
    shown = _launch("--dry-run", "--config=mine.yaml", cwd=tmp_path)
    prepare, run = shown.stdout.splitlines()
    assert "mt_megatron.cli prepare" in prepare and "/train " in run
    assert "mine.yaml names no data, so this trains on" in shown.stderr
    assert f"--save {ROOT}/runs/mine/checkpoints" in run and "--p2p-transport" not in run


def test_a_printed_configuration_without_data_gets_the_scripts(tmp_path: Path) -> None:
    """Printed files hold every option: lists without an entry, and defaults, set nothing."""
    text = load_config(["--model", "llama3_tiny", "--bf16"]).to_yaml()
    assert "data_path: []" in text and "cpu_bf16_products: torch" in text
    (tmp_path / "printed.yaml").write_text(text)
    prepare, run = _launch("--dry-run", "--config", "printed.yaml", cwd=tmp_path).stdout.splitlines()
    assert "mt_megatron.cli prepare" in prepare and "/train " in run
    script = f'. "{ROOT}/examples/launch_common.sh"; PYTHON="{sys.executable}"; read_config printed.yaml'
    read = subprocess.run(
        ["bash", "-c", script + '; echo "${FROM_FILE[@]}"'], cwd=tmp_path, capture_output=True, text=True
    )
    assert "--hidden-size" in read.stdout and not re.search("products|data-path|--save ", read.stdout)


def test_an_interpreter_with_a_relative_path_is_kept(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    script = f'. "{ROOT}/examples/launch_common.sh"; DRY_RUN=1; ensure_environment; echo "$PYTHON"'
    command = ["bash", "-c", script]
    environment = {**os.environ, "PYTHON": "bin/python"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (str(tmp_path / "bin" / "python"), "")


TINY = str(LLAMA3 / "llama3_tiny.yaml")


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ("", {"MODEL": "llama4"}, "expected one of: llama3_405b llama3_70b llama3_8b llama3_tiny"),
        ("", {"NNODES": "2", "NODE_RANK": "0"}, "needs MASTER_ADDR"),
        ("", {"NNODES": "2", "MASTER_ADDR": "10.0.0.1"}, "needs NODE_RANK"),
        ("", {"BACKEND": "abacus"}, "no backend is called 'abacus'"),
        ("", {"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python does not run"),
        ("--config nowhere.yaml", {}, "found no file 'nowhere.yaml'"),
        ("--config", {}, "--config names no file"),
        (f"--config {TINY} --config={TINY}", {}, "--config is given twice"),
        (f"--config {TINY}", {"MODEL": "llama3_8b"}, "expected one of them"),
    ],
)
def test_wrong_use_ends_with_2_and_says_why(arguments: str, changes: dict[str, str], message: str) -> None:
    shown = _launch("--dry-run", *arguments.split(), **changes)
    assert shown.returncode == 2
    assert message in shown.stderr


SMALL = (
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "128"),
    *("--num-attention-heads", "4", "--num-query-groups", "2", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--lr-warmup-iters", "2", "--eval-iters", "2"),
    *("--log-interval", "1", "--save-interval", "1000", "--eval-interval", "1000"),
)


def _places(tmp_path: Path, corpus: Path) -> dict[str, str]:
    return {
        "CORPUS": str(corpus),
        "VOCAB_SIZE": "300",
        "DATA_DIR": str(tmp_path / "prepared data"),
        "RUN_DIR": str(tmp_path / "my run"),
    }


def _train(tmp_path: Path, corpus: Path, iterations: int, **changes: str) -> subprocess.CompletedProcess[str]:
    words = (*SMALL, "--train-iters", str(iterations))
    return _launch(*words, cwd=tmp_path, timeout=240, **_places(tmp_path, corpus), **changes)


LAUNCHES_NOTHING = """#!/bin/sh
case "$*" in "-m mt_megatron.cli launch "*) printf '%s\\n' "$@" && exit 0 ;; esac
exec "{interpreter}" "$@"
"""


def _train_warm(
    tmp_path: Path, corpus: Path, iterations: int, **changes: str
) -> subprocess.CompletedProcess[str]:
    """The script, whose interpreter only says what ``mt-megatron launch`` would be given, then what that
    would start as its only process."""
    python = tmp_path / "python"
    python.write_text(LAUNCHES_NOTHING.format(interpreter=sys.executable))
    python.chmod(0o755)
    shown = _train(tmp_path, corpus, iterations, PYTHON=str(python), **changes)
    assert shown.returncode == 0, shown.stderr
    *said, words = shown.stdout.partition("-m\nmt_megatron.cli\nlaunch\n")
    options, _, words = words.partition("\n--\n")
    assert options == "--gpus-per-node\n1", shown.stdout
    environment = _environment(PYTHONPATH=str(ROOT))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    trained = run_command(
        [sys.executable, "-m", "mt_megatron.cli", "pretrain", *words.splitlines()],
        cwd=tmp_path,
        env=environment,
        timeout=240,
    )
    trained.stdout = said[0] + trained.stdout
    return trained


def _events(tmp_path: Path, kind: str) -> list[dict]:
    lines = (tmp_path / "my run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == kind]


def _terminated(tmp_path: Path, corpus: Path, number: signal.Signals) -> str:
    """Starts the script, sends it ``number`` after a step, and sees it save and leave nothing running."""
    process = subprocess.Popen(
        ["bash", str(LLAMA3 / "dist_run_pretrain.sh"), *SMALL, "--train-iters", "100000"],
        env=_environment(**_places(tmp_path, corpus)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "my run" / "metrics.jsonl"
    started: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 400
        while not (metrics.exists() and '"train"' in metrics.read_text()):
            if process.poll() is not None:
                pytest.fail(process.communicate()[0])
            started = psutil.Process(process.pid).children(recursive=True)
            # Its output is not asked for: that would wait for the end of the run.
            assert time.monotonic() < deadline, "no step within 400 s"
            time.sleep(0.2)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 2
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    finally:
        for child in [*started, process]:
            if child.is_running() if isinstance(child, psutil.Process) else child.poll() is None:
                child.kill()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in started), output
    assert list((tmp_path / "my run" / "checkpoints").glob("iter_*")), output
    return output


def test_stops_at_a_signal_resumes_and_says_when_it_is_complete(tmp_path: Path, corpus: Path) -> None:
    output = _terminated(tmp_path, corpus, signal.SIGTERM)
    assert "training a byte-level BPE" in output
    (end,) = _events(tmp_path, "end")
    assert not end["finished"] and Path(end["checkpoint"]).is_dir()
    last = end["iteration"] + 10

    # The run above has shown how processes are started: the first lane goes on in a warm interpreter.
    second = (_train if DAILY else _train_warm)(tmp_path, corpus, last, NPROC_PER_NODE="1")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "already prepared" in second.stdout and "continuing from" in second.stdout
    steps = [record["iteration"] for record in _events(tmp_path, "train")]
    assert steps == list(range(1, last + 1))
    end = _events(tmp_path, "end")[1]
    assert end["finished"] and end["iteration"] == last and Path(end["checkpoint"]).is_dir()
    assert 0 < end["bigram"] < end["unigram"] and end["valid_loss"] > 0
    assert "unigrams" in second.stdout and "bigrams" in second.stdout
    assert "2 batches to evaluate" in second.stdout and "nothing is left" not in second.stdout

    if not DAILY:
        return
    third = _train(tmp_path, corpus, last, NPROC_PER_NODE="1")
    assert third.returncode == 0, third.stdout + third.stderr
    assert [record["iteration"] for record in _events(tmp_path, "train")] == steps, "nothing left to train"
    assert f"nothing is left to train: {last} of {last} steps are done" in third.stdout
    ends = _events(tmp_path, "end")
    assert ends[2]["finished"] and ends[2]["valid_loss"] == pytest.approx(ends[1]["valid_loss"], rel=1e-6)


@pytest.mark.soak
def test_usr1_stops_it_too(tmp_path: Path, corpus: Path) -> None:
    _terminated(tmp_path, corpus, signal.SIGUSR1)
