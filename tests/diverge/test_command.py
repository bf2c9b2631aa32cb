"""The command itself, with processes of its own: a fault in the user's code on one side is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mt_megatron.cli.main import main
from mt_megatron.cli.progress import ConsoleProgress
from mt_megatron.config.parse import load_config
from mt_megatron.diverge import processes
from mt_megatron.diverge.side import make_side
from tests.diverge.faults import FAULTS
from tests.diverge.recordings import MODEL
from tests.launch import run_command

ROOT = Path(__file__).parent.parent.parent
DATA = MODEL.replace("--train-data-path given-by-the-test", "--mock-data --vocab-size 4096").split()


def diverge(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(
        [
            sys.executable,
            "-m",
            "mt_megatron.cli",
            "diverge",
            "--a",
            "cpu",
            "--output",
            str(folder),
            *arguments,
            *DATA,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        cwd=folder.parent,
        timeout=600,
    )


def test_a_fault_in_imported_code_is_named(tmp_path: Path) -> None:
    fault = str(ROOT / "tests" / "diverge" / "faults.py")
    arguments = ["--b", "cpu", "--b-flags=--tensor-model-parallel-size 2", "--b-import", fault, "--json"]
    done = diverge(tmp_path / "run", *arguments, MT_TEST_PLANT="missing_all_reduce")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["suspect"] == FAULTS["missing_all_reduce"][1]
    assert report["sides"]["b"]["processes"] == 2 and report["equal"] is False
    said = [line.split(" in ")[0] for line in done.stderr.splitlines() if line.startswith("diverge: ")]
    assert said == [
        "diverge: side a: cpu, 1 process ...",
        "diverge: side a: done",
        "diverge: side b: cpu, 2 processes ...",
        "diverge: side b: done",
        "diverge: comparing",
    ]
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    assert "**first**" in (tmp_path / "run" / "report.md").read_text()
    assert (tmp_path / "run" / "picture.svg").read_text().startswith("<svg")


def test_the_progress_of_a_side_is_shown_on_a_terminal_and_the_records_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(ConsoleProgress, "has_bar", property(lambda self: True))
    monkeypatch.setattr(ConsoleProgress, "show", lambda self, now, *counts: shown.append(counts[:2]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "run"
    assert main(["diverge", "--a", "cpu", "--b", "cpu", "--output", str(folder), *DATA]) == 0
    done, total = shown[-1]
    assert 0 < done <= total and total == max(shown, key=lambda each: each[1])[1]
    assert {0, done} < {done for done, _ in shown}, "nothing between the first and the last"
    assert not list(folder.glob("[ab]/rank_*.[!j]*")) and not (folder / "initial").exists()
    assert {path.name for path in folder.glob("a/*")} == {"rank_0.json", "side.json", "stderr.0", "stdout.0"}


def test_a_change_outside_the_model_is_a_note(tmp_path: Path) -> None:
    """Of classes that this import is the first to need, before and after it needs them."""
    (tmp_path / "mine.py").write_text(
        "from megatron.core.transformer.dot_product_attention import DotProductAttention\n"
        "from megatron.core.transformer.attention import Attention\n"
        "DotProductAttention.forward = DotProductAttention.extra = lambda self, *given: 1 / 0\n"
        "Attention.extra = 1\n"
        "from megatron.core.models.T5.t5_model import T5Model\n"
        "T5Model.forward = None\n"
    )
    done = diverge(tmp_path / "run", "--b", "cpu", "--b-import", str(tmp_path / "mine.py"))
    assert done.returncode == 0, done.stderr
    changed = "note: the import on side b changed megatron.core."
    upstream, place = (
        f"{each}:DotProductAttention"
        for each in ("dot_product_attention", "mt_megatron.layers.attention.core")
    )
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("note: the import")) == [
        f"{changed}models.T5.t5_model:T5Model (forward), of which the model has no module",
        f"{changed}transformer.{upstream} (forward, extra), of which the model has no module; it has "
        f"{place} in its place: change that",
    ]


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('my code is broken')\n")
    done = diverge(tmp_path / "run", "--b", "cpu", "--a-import", str(tmp_path / "mine.py"))
    assert done.returncode == 1 and done.stdout == ""
    assert "SideFailedError: side a (cpu): rank 0 ended with exit code 1" in done.stderr
    assert "my code is broken" in done.stderr


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("cpuu", "no backend is called 'cpuu'; installed are cpu, cuda, musa; did you mean 'cpu'?"),
        ("musa", "side b: backend 'musa' was asked for but cannot be used here"),
    ],
)
def test_both_backends_are_checked_before_a_side_starts(
    backend: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the first example of --help, whose mock data names no tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "run_side", lambda *_: pytest.fail("it was started"))
    words = "--model llama3_tiny --mock-data --global-batch-size 2 --lr 1e-3"
    assert main(["diverge", "--a", "cpu", "--b", backend, *words.split()]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_mock_data_needs_no_tokenizer() -> None:
    common = ["--mock-data", "--global-batch-size", "2", "--lr", "1e-3"]
    tiny = make_side("a", backend="cpu", common=[*common, "--model", "llama3_tiny"]).config()
    assert (tiny.data.tokenizer_type, tiny.model.vocab_size) == ("NullTokenizer", 4096)
    given = make_side("a", backend="cpu", common=[*common, "--model", "llama3_tiny", "--vocab-size", "5000"])
    assert given.config().model.vocab_size == 5000
    published = load_config(["--model", "llama3.1_8b"]).model.vocab_size
    named = make_side("a", backend="cpu", common=[*common, "--model", "llama3.1_8b"], check_files=False)
    assert published is not None and named.config().model.vocab_size == published
