"""The ranks' side: whole runs of the trainer that are paused, perturbed, undone, stopped."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.checkpoint.files import read_manifest
from mt_megatron.config.parse import load_config
from mt_megatron.errors import MtMegatronError
from mt_megatron.scope import session
from mt_megatron.scope.control.commands import answered, leave
from mt_megatron.training import loop
from mt_megatron.training.loop import train
from mt_megatron.training.validate import validate
from tests.training.loop_cases import MODEL, TRAINING, start

SMALL = f"{MODEL} {TRAINING} --num-layers 2 --eval-iters 0 --scope record --global-batch-size 4"

Commander = Callable[[Path], None]
"""What somebody else does beside rank 0, in a thread, with the folder RUN/scope."""


def run(flags: str, folder: Path, commander: Commander | None = None, *, scan: str = "off") -> dict[str, Any]:
    """One run: its lines, losses by step (the last attempt's), final weights' digest, and how it ended."""
    lines, problems = io.StringIO(), []
    digest: list[str] = []
    original, take = loop._Run.close, loop.Steps.take

    def closed(self: Any) -> None:
        digest.append(_digest(self))
        original(self)

    def slow(self: Any, *given: Any, **named: Any) -> Any:
        # Rank 0 looks for commands twice a second: a run of milliseconds would be over before.
        if self.progress.iteration < 3:
            time.sleep(0.6)
        return take(self, *given, **named)

    def command() -> None:
        try:
            assert commander is not None
            while not (folder / "scope" / "commands").is_dir():
                time.sleep(0.02)
            commander(folder / "scope")
        except Exception as error:  # noqa: BLE001 - told in the result
            problems.append(f"{type(error).__name__}: {error}")

    loop._Run.close = closed  # type: ignore[method-assign]
    if commander is not None:
        loop.Steps.take = slow  # type: ignore[method-assign]
    # Nothing here is about what a sidecar records, and it takes a second to start.
    session.sidecar_process = lambda run, *others, **options: _NoSidecar(Path(run) / "nowhere")
    thread = threading.Thread(target=command, daemon=True)
    if commander is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        thread.start()
    error = None
    try:
        with contextlib.redirect_stdout(lines):
            config = load_config(f"{SMALL} --scan {scan} --save {folder} {flags}".split())
            validate(config, world_size=dist.get_world_size() if dist.is_initialized() else 1)
            outcome = train(config)
    except MtMegatronError as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        loop._Run.close, loop.Steps.take = original, take  # type: ignore[method-assign]
    _over.set()
    if thread.is_alive() or thread.ident is not None:
        thread.join(20)
    _over.clear()
    metrics = folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [each for each in records if each["event"] == "train"]
    return {
        "lines": lines.getvalue().splitlines(),
        "problems": problems,
        "error": error,
        "losses": {each["iteration"]: each["loss"] for each in steps},
        "perturbed": sorted({each["iteration"] for each in steps if each.get("perturbed")}),
        "attempts": len(steps),
        "digest": digest[-1] if digest else None,
        "iteration": None if error else outcome.progress.iteration,
        "finished": None if error else outcome.finished,
        "checkpoints": sorted(path.name for path in folder.glob("iter_*")),
        "marks": {path.name: read_manifest(path).get("perturbed") for path in folder.glob("iter_*")},
        "validated": [each.get("perturbed") for each in records if each["event"] == "valid"],
        "audit": _audit(folder),
    }


@dataclass(frozen=True)
class _NoSidecar:
    socket: Path

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


def _digest(trained: Any) -> str:
    found = hashlib.sha256()
    for chunk in trained.trainable.chunks:
        for parameter in chunk.parameters():
            found.update(parameter.detach().float().cpu().numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def _audit(folder: Path) -> list[str]:
    path = folder / "scope" / "audit.jsonl"
    return [json.loads(line)["what"] for line in path.read_text().splitlines()] if path.exists() else []


def tell(folder: Path, do: str, timeout: float = 60.0, **arguments: Any) -> Any:
    """Leave a command and wait for its answer. Raises RuntimeError for an error and when none comes."""
    identity = leave(folder, do, arguments)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        found = answered(folder, identity)
        if found is not None:
            if not found["ok"]:
                raise RuntimeError(found["error"])
            return found.get("value")
        if _over.is_set():
            break
        time.sleep(0.01)
    raise RuntimeError(f"no answer to {do} within {timeout:g} s, or before the run was over")


_over = threading.Event()
"""Set when a run has ended: nobody answers any more."""


def paused_and_perturbed(folder: str) -> dict[str, Any]:
    """A run alone; paused, stepped and resumed; perturbed by file and undone by itself."""
    start()
    root, found = Path(folder), dict[str, Any]()
    found["alone"] = run("--train-iters 8", root / "alone")

    def pauses(scope: Path) -> None:
        value = tell(scope, "pause")
        assert value["paused"], value
        first = tell(scope, "status")["step"]
        time.sleep(0.3)
        assert tell(scope, "status")["step"] == first, "it stands still"
        tell(scope, "step", n=2)
        until = time.monotonic() + 30
        while not (tell(scope, "status")["paused"] and tell(scope, "status")["step"] == first + 2):
            assert time.monotonic() < until, tell(scope, "status")
            time.sleep(0.02)
        made = tell(scope, "generate", ids=[1, 2, 3], n=2)
        assert len(made["tokens"]) == 2
        tell(scope, "resume")

    found["paused"] = run("--train-iters 8", root / "paused", pauses)
    lab = _file(root / "lab.yaml", NOISE)
    found["undone"] = run(f"--train-iters 8 --scope-lab {lab} --save-interval 2", root / "undone")
    return found


def kept(folder: str) -> dict[str, Any]:
    """A run perturbed for good: saved, continued, and begun from its weights."""
    start()
    root, found = Path(folder), dict[str, Any]()
    kept = _file(root / "kept.yaml", NOISE.replace("undo_at: 6", "snapshot: false"))
    also = f"--train-iters 6 --save-interval 2 --async-save --eval-iters 1 --scope-lab {kept}"
    found["kept"] = run(f"--exit-interval 4 {also}", root / "kept")
    found["goes on"] = run(also, root / "kept")
    found["from its weights"] = run(f"--train-iters 2 --scope off --load {root / 'kept'}", root / "later")
    nan = "- {name: nan, kind: stuck, value: .nan, on: weight, steps: 3, module: '*.linear_fc2',\n"
    nan += "   snapshot: false}\n"
    lab = _file(root / "nan.yaml", nan)
    back = "--train-iters 6 --save-interval 2 --on-divergence rollback --eval-iters 1"
    found["rolled back"] = run(f"{back} --scope-lab {lab}", root / "back")
    return found


NOISE = (
    "- {name: noise, kind: gaussian, sigma: 0.5, on: weight, steps: 3-4, undo_at: 6,\n"
    "   module: 'decoder.layers.1.*'}\n"
)


def _file(path: Path, perturbations: str) -> Path:
    if dist.get_rank() == 0:
        path.write_text(f"perturbations:\n{perturbations}")
    dist.barrier()
    return path


def ended(folder: str) -> dict[str, Any]:
    """Runs that end: perturbed, in a pause, before they begin; and one that diverges perturbed."""
    start()
    root, found = Path(folder), dict[str, Any]()
    found["alone"] = run("--train-iters 8", root / "alone")
    endless = _file(root / "endless.yaml", NOISE.replace(", undo_at: 6", ""))
    found["ended"] = run(f"--train-iters 8 --exit-interval 5 --scope-lab {endless}", root / "ended")
    found["continued"] = run("--train-iters 8", root / "ended")

    def stops(scope: Path) -> None:
        tell(scope, "pause")
        os.kill(os.getpid(), signal.SIGTERM)

    found["stopped"] = run("--train-iters 8", root / "stopped", stops)
    found["resumed"] = run("--train-iters 8", root / "stopped")
    wrong = _file(root / "wrong.yaml", NOISE.replace("layers.1", "layers.7"))
    found["wrong"] = run(f"--train-iters 8 --scope-lab {wrong}", root / "wrong")
    nan = "- {name: nan, kind: stuck, value: .nan, on: weight, steps: 4, module: '*.linear_fc2'}\n"
    diverging = _file(root / "diverging.yaml", nan)
    found["diverged"] = run(f"--train-iters 8 --scope-lab {diverging}", root / "diverged")
    scaled = "- {name: scaled, kind: scale, factor: 1.5, on: weight, steps: 2, module: '*.linear_fc2'}\n"
    failing = (scaled + nan.replace("on: weight", "on: activation")).replace(
        "kind:", "snapshot: false, kind:"
    )
    found["failed"] = run(
        f"--train-iters 8 --scope-lab {_file(root / 'failing.yaml', failing)}", root / "failed"
    )
    return found


def watched(folder: str, seconds: float) -> dict[str, Any]:
    """A run that is traced and watched, with a watchdog of one second, and paused for longer than any
    patience."""
    start()
    root, paused = Path(folder), [0.0]
    alone = run("--train-iters 6", root / "alone")

    def pauses(scope: Path) -> None:
        tell(scope, "pause")
        began = time.monotonic()
        time.sleep(seconds)
        tell(scope, "resume")
        paused[0] = time.monotonic() - began

    found = run("--train-iters 6 --watchdog-seconds 5", root / "watched", pauses, scan="base")
    findings = root / "watched" / "scan" / "findings.jsonl"
    told = [json.loads(line) for line in findings.read_text().splitlines()] if findings.exists() else []
    hangs = [each for each in told if each.get("finding", each).get("cause") in ("hang", "stopped", "pause")]
    return {"alone": alone, "run": found, "findings": hangs, "seconds": paused[0]}


def trials(folder: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Runs in which somebody pauses, steps, resumes and goes away at random; the first is left alone."""
    start()
    root, rng = Path(folder), random.Random(seed)
    found = [run("--train-iters 12", root / "alone")]
    for number in range(count):
        drawn = rng.randrange(1 << 30)

        def commander(scope: Path, drawn: int = drawn) -> None:
            rng = random.Random(drawn)
            time.sleep(rng.random() * 0.3)
            for _ in range(rng.randint(1, 4)):
                tell(scope, "pause")
                time.sleep(rng.random() * 0.1)
                for _ in range(rng.randint(0, 2)):
                    with contextlib.suppress(RuntimeError):
                        tell(scope, "step", n=rng.randint(1, 2), timeout=5)
                    time.sleep(rng.random() * 0.05)
                if rng.random() < 0.3:
                    return  # the commander goes away, in the pause or in the steps that lead to one
                tell(scope, "resume", timeout=5)
                time.sleep(rng.random() * 0.1)

        # Whoever goes away leaves a pause that ends by itself after 0.3 seconds.
        found.append(run("--train-iters 12 --scope-pause-minutes 0.005", root / f"trial{number}", commander))
    return found
