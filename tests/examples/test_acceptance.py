"""The promise of the README, on a fresh clone: one command sets up, trains past the bigrams, and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 6


def _metrics(clone: Path) -> list[dict]:
    lines = (clone / "runs" / "llama3_tiny" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.soak
def test_one_command_on_a_fresh_clone(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    clone = tmp_path / "a fresh clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    script = ["bash", str(clone / "examples" / "llama3" / "dist_run_pretrain.sh")]
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    environment = {name: value for name, value in os.environ.items() if name in kept or "PIP" in name}
    # A bare machine: the environment that runs this test is not to be found.
    ours = Path(sys.executable).parent
    environment["PATH"] = os.pathsep.join(p for p in environment["PATH"].split(os.pathsep) if Path(p) != ours)

    began = time.monotonic()
    first = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=3000)
    assert first.returncode == 0, first.stdout + first.stderr
    record_property("seconds with set-up", round(time.monotonic() - began))
    assert (clone / ".venv" / "bin" / "python").exists()
    end = _metrics(clone)[-1]
    assert end["event"] == "end" and end["finished"]
    for name in ("valid_loss", "bigram", "unigram", "seconds", "iteration"):
        record_property(name, end[name])
    assert end["valid_loss"] < end["bigram"] < end["unigram"]
    assert Path(end["checkpoint"]).is_dir()

    again = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
    repeated = _metrics(clone)[-1]
    assert repeated["iteration"] == end["iteration"], "training was complete"
    assert repeated["valid_loss"] == pytest.approx(end["valid_loss"], rel=1e-6)
    assert end["seconds"] < 60 * MINUTES, "the limit holds for two cores that nobody else uses"
