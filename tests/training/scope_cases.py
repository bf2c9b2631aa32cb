"""The ranks' side of the tests of watching in the training loop."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist

from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.config.parse import load_config
from mt_megatron.errors import MtMegatronError
from mt_megatron.seams import events
from mt_megatron.training import loop
from mt_megatron.training.scope_session import Scope
from tests.locks import locked_by_another
from tests.second_lane import DAILY
from tests.training.faults import injected
from tests.training.loop_cases import MODEL, TRAINING, start

STEPS = 4
ENDS_IN = 3
"""The step in which a run ends that does not go to its end."""

_FLAGS = f"{MODEL} {TRAINING} --train-iters {STEPS} --eval-iters 0 --scan off --hidden-dropout 0"
_SMALLER = "" if DAILY else "--num-layers 2 --micro-batch-size 4"


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
    if dist.get_rank() == 1:
        # As where a package is missing on one node.
        sys.modules["mt_megatron.scope.session"] = None  # type: ignore[assignment]
    found["no_package"] = _run(f"--save {folder}/no_package --scope record --scope-interval 2")
    sys.modules.pop("mt_megatron.scope.session")
    found["not_made"] = _beside(f"{folder}/not_made", _not_made)
    found["not_ended"] = _beside(f"{folder}/not_ended", _NotEnded)
    own = Path(folder) / f"tmp{dist.get_rank()}"
    own.mkdir()
    with patch.object(tempfile, "tempdir", str(own)):
        # As in two containers of one machine, whose host name they share.
        found["containers"] = _run(f"--scope-dir {folder}/containers --scope record --train-iters 2")
    with _unreached() as warnings:
        found["unreached"] = _run(f"--scope-dir {folder}/unreached --scope record --train-iters 2")
    found["unreached"]["warnings"] = [warning.getMessage() for warning in warnings]
    lab = Path(folder) / "lab.yaml"
    if dist.get_rank() == 0:
        noise = (
            "name: noise, kind: gaussian, sigma: 0.5, on: weight, module: 'decoder.layers.1.*', steps: 3-9"
        )
        lab.write_text(f"perturbations:\n- {{{noise}}}\n")
    dist.barrier()
    found["undone"] = _run(f"--save {folder}/undone --scope record --scope-interval 1 --scope-lab {lab}")
    with _broken():
        found["broken"] = _run(f"--save {folder}/broken --scope record --scope-interval 1")
    return found


def ended_runs(folder: str, names: list[str]) -> dict[str, Any]:
    """Runs of two nodes, one rank each, that end in different ways; the error that each ended with. And one
    whose folder another run holds."""
    start()
    from mt_megatron.scope import session

    # Ranks of one boot are those of one node.
    session.boot_id = lambda: f"boot of rank {dist.get_rank()}"
    found: dict[str, Any] = {"refused": _refused(f"{folder}/refused")}
    return found | {name: _ended(f"{folder}/{name}", name) for name in names}


def _refused(run: str) -> dict[str, Any]:
    """A run whose folder another one holds, with the files that lie there afterwards."""
    root = Path(run) / "scope"
    with ExitStack() as held:
        if dist.get_rank() == 0:
            root.mkdir(parents=True)
            held.enter_context(locked_by_another(root / "run.lock"))
        dist.barrier()
        found = _run(f"--scope-dir {run} --scope record --train-iters 1")
        dist.barrier()
    found["files"] = sorted(path.name for path in root.iterdir())
    return found


def _beside(run: str, sidecar: Callable[..., Any]) -> dict[str, Any]:
    """A run whose sidecar ``sidecar`` makes; ``free`` of rank 0 says if its folder is so afterwards."""
    from mt_megatron.scope.sidecar import process

    with patch.object(process, "SidecarProcess", sidecar):
        found = _run(f"--scope-dir {run} --scope record --train-iters 1")
    if dist.get_rank() == 0:
        with FileLock(Path(run) / "scope" / "run.lock") as lock:
            found["free"] = lock.state == "held"
    return found


@contextmanager
def _unreached() -> Iterator[list[logging.LogRecord]]:
    """Rank 1 does not see the folder of its node's sidecar; what is logged meanwhile."""
    from mt_megatron.scope import session

    def elsewhere(path: str, *given: Any, **options: Any) -> Any:
        return sender(path if dist.get_rank() == 0 else "/nowhere/s", *given, **options)

    sender = session.Sender
    warnings: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = warnings.append  # type: ignore[method-assign]
    session.logger.addHandler(handler)
    try:
        with patch.object(session, "Sender", elsewhere):
            yield warnings
    finally:
        session.logger.removeHandler(handler)


def _not_made(*given: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _NotEnded:
    """A sidecar that listens nowhere and whose ``close`` raises an error."""

    def __init__(self, run: Path, *given: Any, **options: Any) -> None:
        self.socket = run / "nowhere" / "s"

    def start(self) -> None:
        pass

    def has_told(self, seconds: float) -> bool:
        return True

    def close(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _ended(save: str, how: str) -> str | None:
    from mt_megatron.scope.sidecar.sidecar import DRAIN_SECONDS

    def listener(phase: str, name: str, attrs: Any) -> None:
        if (phase, name) == ("begin", "step"):
            now[0] = attrs["iteration"]
        elif (phase, name, now[0]) == ("begin", "optimizer", ENDS_IN):
            if how == "error":
                raise RuntimeError("an error within the step")
            if how == "signal":
                # As a scheduler does it: to every process of the job. Only one rank hears of it here.
                for child in psutil.Process().children():
                    if "mt_megatron.scope.sidecar" in child.cmdline():
                        child.terminate()
                time.sleep(DRAIN_SECONDS + 1.5)
                if dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

    now = [0]
    bad = {"module": "decoder.layers.0.mlp", "kind": "forward", "value": "nan", "rank": 1, "steps": [ENDS_IN]}
    stop_listening = events.subscribe(listener)
    watched = "--scope record --scope-interval 1 --scope-watch residual@decoder.layers.0:samples=0,7"
    try:
        with injected(bad if how == "nan" else None):
            loop.train(load_config(f"{_FLAGS} --save {save} {watched}".split()))
    except (MtMegatronError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        stop_listening()
    return None


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
    make, start = loop.scope_of, Scope.start

    def made(*args: Any, say: Callable[[str], None], **more: Any) -> Scope:
        def keep(line: str) -> None:
            found["lines"].append(line)
            say(line)

        return make(*args, say=keep, **more)

    def started(self: Scope) -> None:
        start(self)
        found["during"] = sorted(_threads())

    loop.scope_of, Scope.start = made, started  # type: ignore[assignment, method-assign]
    try:
        outcome = loop.train(load_config(f"{_FLAGS} {_SMALLER} {flags}".split()))
    finally:
        loop.scope_of, Scope.start = make, start  # type: ignore[method-assign]
    found |= {
        "finished": outcome.finished,
        "iteration": outcome.progress.iteration,
        "loss": (outcome.loss or 0.0).hex(),
        "after": sorted(_threads()),
    }
    return found


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("scope-")}
