"""The ranks' side of the tests of watching in the training loop."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.config.parse import load_config
from mt_megatron.training.loop import train
from mt_megatron.training.scope_session import Scope
from tests.training.loop_cases import MODEL, TRAINING, start

STEPS = 4
_FLAGS = f"{MODEL} {TRAINING} --train-iters {STEPS} --eval-iters 0 --scan off --hidden-dropout 0"


def watched_runs(folder: str) -> dict[str, Any]:
    """Short runs that are watched, not, or cannot be."""
    start()
    found = {"off": _run(f"--save {folder}/off --scope off")}
    found["off"]["loaded"] = sorted(name for name in sys.modules if name == "mt_megatron.scope.session")
    found["nowhere"] = _run("")
    recorded = f"--save {folder}/record --scope record --scope-interval 2 --scope-sink tensorboard"
    found["record"] = _run(f"{recorded} --scope-watch mlp@nowhere mlp@decoder.layers.1")
    found["again"] = _run(f"{recorded} --train-iters {STEPS + 2}")
    if dist.get_rank() == 0:
        (Path(folder) / "blocked").mkdir()
        (Path(folder) / "blocked" / "scope").write_text("in the way")
    dist.barrier()
    found["blocked"] = _run(f"--save {folder}/blocked --scope record --scope-interval 2")
    with _missing("uvicorn"):
        found["no_page"] = _run(f"--save {folder}/no_page --scope live --scope-interval 2")
    with _broken():
        found["broken"] = _run(f"--save {folder}/broken --scope record --scope-interval 1")
    return found


@contextmanager
def _missing(package: str) -> Iterator[None]:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == package else find(name, *more)  # type: ignore[assignment]
    try:
        yield
    finally:
        importlib.util.find_spec = find


@contextmanager
def _broken() -> Iterator[None]:
    """A statistic raises an error."""
    from mt_megatron.scope.watch import defaults, parameters

    originals = [(module, module.square_sum) for module in (defaults, parameters)]

    def fails(values: Any) -> Any:
        raise RuntimeError("no more memory")

    for module, _ in originals:
        module.square_sum = fails  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, original in originals:
            module.square_sum = original  # type: ignore[attr-defined]


def _run(flags: str) -> dict[str, Any]:
    found: dict[str, Any] = {"lines": [], "during": []}
    original = Scope.start

    def started(self: Scope) -> None:
        if self.session is not None:
            say: Callable[[str], None] = self.session._say

            def keep(line: str) -> None:
                found["lines"].append(line)
                say(line)

            self.session._say = keep
        original(self)
        found["during"] = sorted(_threads())

    Scope.start = started  # type: ignore[method-assign]
    try:
        outcome = train(load_config(f"{_FLAGS} {flags}".split()))
    finally:
        Scope.start = original  # type: ignore[method-assign]
    found |= {
        "finished": outcome.finished,
        "iteration": outcome.progress.iteration,
        "loss": (outcome.loss or 0.0).hex(),
        "after": sorted(_threads()),
    }
    return found


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("scope-")}
