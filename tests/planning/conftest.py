"""What several files of this folder measure in one process."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from tests.launch import run_command


@pytest.fixture(scope="session")
def executed() -> dict[str, list[dict[str, Any]]]:
    """What ``tests.planning.executed`` found: ``peaks`` and ``flops``, by case."""
    done = run_command(
        [sys.executable, "-m", "tests.planning.executed"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("executed:"))
    found: dict[str, list[dict[str, Any]]] = json.loads(line.removeprefix("executed:"))
    return found
