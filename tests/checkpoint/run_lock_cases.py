"""The ranks' side of the tests of two runs that save to one folder."""

from __future__ import annotations

import contextlib
import errno
import io
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint import file_locks
from mt_megatron.checkpoint.files import complete_checkpoints
from tests.nfs_locks import flock_that_fails
from tests.training.loop_cases import run, start

SHORT = "--eval-iters 0 --num-layers 2 --hidden-dropout 0 --attention-dropout 0"


def all_cases(folder: str) -> dict[str, Any]:
    """``taken`` is locked by another process."""
    start()
    own = f"{SHORT} --save {folder}/own"
    found: dict[str, Any] = {"taken": run(f"{SHORT} --save {folder}/taken", folder, "taken")}
    run(f"{own} --train-iters 2", folder, "own")
    found["over"] = run(f"{own} --resume never", folder, "over")
    found["kept"] = [each.name for each in complete_checkpoints(Path(folder) / "own")]
    again = f"{own} --resume never --save-over-others --train-iters 1"
    found["confirmed"] = run(again, folder, "confirmed")
    real = file_locks.fcntl.flock
    file_locks.fcntl.flock = flock_that_fails(errno.ENOLCK)
    try:
        unlocked, output = f"{SHORT} --train-iters 1 --save {folder}/unlocked", io.StringIO()
        with contextlib.redirect_stdout(output):
            found["unlocked"] = run(unlocked, folder, "unlocked")
            found["strict"] = run(f"{unlocked} --strict", folder, "strict")
        found["said"] = output.getvalue().splitlines()
    finally:
        file_locks.fcntl.flock = real
    return found
