"""The command itself, with processes of its own: a fault in the user's code on one side is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.diverge.faults import FAULTS
from tests.diverge.recordings import MODEL

ROOT = Path(__file__).parent.parent.parent
DATA = MODEL.replace("--train-data-path given-by-the-test", "--mock-data --vocab-size 4096").split()


def diverge(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
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
        capture_output=True,
        text=True,
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
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    assert "**first**" in (tmp_path / "run" / "report.md").read_text()
    assert (tmp_path / "run" / "picture.svg").read_text().startswith("<svg")


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('my code is broken')\n")
    done = diverge(tmp_path / "run", "--b", "cpu", "--a-import", str(tmp_path / "mine.py"))
    assert done.returncode == 1 and done.stdout == ""
    assert "SideFailedError: side a (cpu): rank 0 ended with exit code 1" in done.stderr
    assert "my code is broken" in done.stderr
