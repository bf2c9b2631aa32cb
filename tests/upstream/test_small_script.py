"""A script that says ``cuda`` everywhere trains on cpu, and its losses are those of plain torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulators import environment as emulator
from tests.emulators import needs_emulated_musa
from tests.launch import ROOT, run_command
from tests.upstream.oracle import losses

SCRIPT = Path(__file__).parent / "scripts" / "small_script.py"


def train(folder: Path, ranks: int, backend: str, extra: Mapping[str, str]) -> dict[str, Any]:
    """Run the script as a user does: alone by ``mt-megatron run``, or below torchrun."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **extra,
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = run_command(
        [sys.executable, *(launcher if ranks > 1 else []), "-m", "mt_megatron.cli", "run"]
        + ["--backend", backend, "--", str(SCRIPT), str(folder)],
        env=environment,
        cwd=folder,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        pytest.param("cpu", 1),
        pytest.param("cpu", 2, marks=pytest.mark.daily),
        pytest.param("musa", 1, marks=[needs_emulated_musa(), pytest.mark.daily]),
    ],
)
def test_losses_are_those_of_plain_torch(tmp_path: Path, backend: str, ranks: int) -> None:
    """``musa`` is the emulator of tests/emulators, on this host's memory."""
    found = train(tmp_path, ranks, backend, emulator() if backend == "musa" else {})
    weights = torch.load(tmp_path / "weights.pt", weights_only=False, map_location="cpu")
    expected = losses(weights, steps=6, batch=2 * ranks)
    assert found["losses"] == pytest.approx(expected, rel=2e-6)
    assert found["repeated"] == found["losses"][3:], "resumed: to the bit"
    assert max(expected) - min(expected) > 0.05, "there was something to get wrong"
    kind, count, available = json.loads((tmp_path / "child.0.json").read_text())
    assert (kind, available) == ("torch.cuda.FloatTensor", True), "a spawned process"
    assert count == (ranks if backend == "cpu" else 1)
    # What runs from a string is nobody's script; the module that it imports from the folder is.
    assert found["told"] == ["False", "True"]
