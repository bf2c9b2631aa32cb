"""The ranks' side: the script of scripts/recorded_script.py, recorded and not, one after the other."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.launching.scripts.choice import Recorded
from mt_megatron.launching.scripts.recording import record
from mt_megatron.scope.control import control
from mt_megatron.scope.control.commands import answered, leave
from mt_megatron.seams import events, script

SCRIPTS = Path(__file__).parent / "scripts"


def _script() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    mt_megatron.patch("cpu", scope=[SCRIPTS])
    import recorded_script

    return recorded_script


class Oracle:
    """Root mean squares of the layers' outputs by step, out of torch's own hook on all modules."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self._calls: Counter[int] = Counter()
        self._hook = torch.nn.modules.module.register_module_forward_hook(self._see)

    def _see(self, module: Any, inputs: Any, output: Any) -> None:
        if type(module).__name__ != "TransformerLayer" or not module.training:
            return
        number, values = module.layer_number - 1, output[0].detach().double()
        step = self._calls[number] // 2 + 1  # of two micro-batches
        self._calls[number] += 1
        sums = self.sums.setdefault(f"{step} decoder.layers.{number}", [0.0, 0.0])
        sums[0] += float((values**2).sum())
        sums[1] += values.numel()

    def close(self) -> dict[str, float]:
        self._hook.remove()
        return {key: math.sqrt(squares / count) for key, (squares, count) in self.sums.items()}


def _recording(folder: str, scope: str = "record") -> Any:
    record(Recorded(run=Path(folder), scan="base", scope=scope, interval=1))
    return script.observer


def compare(folder: str, tensor: int, pipeline: int, alone: bool) -> dict[str, Any]:
    """Losses and weights of a script without and with both, and what is left when it has ended."""
    made = _script()
    found: dict[str, Any] = {"losses": [], "weights": []}
    dist.init_process_group("gloo")
    state = sys.modules["megatron.core.parallel_state"]
    hooks = _hooks()
    for recorded in (False, True):
        observer = _recording(folder) if recorded else None
        assert script.observer is observer
        state.initialize_model_parallel(tensor, pipeline)
        oracle = Oracle() if recorded else None
        found["losses"].append(made.train(5, alone=alone))
        found["weights"].append(_random_numbers())
        state.destroy_model_parallel()
        if oracle is not None and observer is not None:
            found["oracle"] = oracle.close()
            observer.end(os.getpid())
    found["left"] = [script.observer is not None, events.listening(), _hooks() - hooks]
    found["threads"] = sorted(
        each.name for each in threading.enumerate() if each.name.startswith(("scan", "scope"))
    )
    return found


def _random_numbers() -> str:
    """The host's and the device's next ones: what draws in between would show."""
    from megatron.core import tensor_parallel

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return hashlib.sha256(
        torch.get_rng_state().numpy().tobytes()
        + b"".join(states[name].numpy().tobytes() for name in sorted(states))
    ).hexdigest()


def _hooks() -> int:
    from torch.optim import optimizer

    return len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks)


def command(folder: str) -> dict[str, Any]:
    """A script of one process that is paused, perturbed and asked for what it cannot do."""
    made = _script()
    control.LOOK_SECONDS = 0.05  # a dozen commands, one after the other
    observer = _recording(folder)
    answers: dict[str, Any] = {}
    scope = Path(folder) / "scope"

    def ask(do: str, **arguments: Any) -> dict[str, Any]:
        identity = leave(scope, do, arguments)
        until = time.monotonic() + 30
        while (answer := answered(scope, identity)) is None:
            assert time.monotonic() < until, f"no answer to {do}"
            time.sleep(0.02)
        return answer

    def commander() -> None:
        while not (scope / "commands").is_dir():
            time.sleep(0.02)
        for do in ("undo", "step", "generate"):
            answers[do] = ask(do)
        noise = {"name": "noise", "kind": "gaussian", "sigma": 0.5, "on": "activation"}
        one = {**noise, "module": "decoder.layers.0.mlp"}
        answers["pair"] = ask("pair", perturbation=one)
        answers["pause"] = ask("pause")
        time.sleep(0.3)
        answers["paused"] = ask("status")
        answers["undo_at"] = ask("arm", perturbation={**one, "undo_at": 900})
        answers["arm"] = ask("arm", perturbation=one)
        answers["resume"] = ask("resume")
        while True:
            answers["armed"] = ask("status")
            if answers["armed"]["value"]["armed"][0]["state"] == "acting":
                break
        answers["weights"] = ask(
            "arm", perturbation={"name": "w", "kind": "scale", "factor": 1.5, "on": "weight",
                                 "module": "decoder.layers.1.mlp.linear_fc2.weight"},
        )  # fmt: skip
        answers["disarm"] = ask("disarm", id="noise")

    dist.init_process_group("gloo")
    sys.modules["megatron.core.parallel_state"].initialize_model_parallel()
    thread = threading.Thread(target=commander)
    thread.start()
    made.train(600, seconds=0.02, until=lambda: not thread.is_alive())
    observer.end(os.getpid())
    thread.join(30)
    return answers


def resumed(folder: str) -> dict[str, Any]:
    """The script goes on from 40 samples, 4 a step, and is initialised a second time."""
    made = _script()
    observer = _recording(folder, scope="off")
    dist.init_process_group("gloo")
    state = sys.modules["megatron.core.parallel_state"]
    state.initialize_model_parallel()
    made.train(2, counted=40)
    first = observer._trainer.iteration
    state.destroy_model_parallel()
    state.initialize_model_parallel()
    made.train(2)
    second = observer._trainer.iteration
    observer.end(os.getpid())
    return {"first": first, "second": second}


def short(folder: str) -> list[float]:
    """Losses of two steps that are to be traced."""
    made = _script()
    observer = _recording(folder, scope="off")
    dist.init_process_group("gloo")
    sys.modules["megatron.core.parallel_state"].initialize_model_parallel()
    losses: list[float] = made.train(2)
    observer.end(os.getpid())
    return losses


def slow(folder: str) -> None:
    """Rank 1 of two takes several times as long for its own work from the middle on."""
    from mt_megatron.backends import registry
    from mt_megatron.scan.drill.faults import parse_fault
    from mt_megatron.scan.drill.inject import Injector

    made = _script()
    observer = _recording(folder, scope="off")
    dist.init_process_group("gloo")
    sys.modules["megatron.core.parallel_state"].initialize_model_parallel(2, 1)
    injector = Injector(dist.get_rank(), Path(folder), registry.get("cpu"))
    fault = parse_fault("slow_compute:rank=1,factor=4")
    stop = events.subscribe(
        lambda phase, name, attrs: injector.set([fault]) if attrs.get("iteration") == 60 else None, {"step"}
    )
    made.train(120)
    stop()
    injector.close()
    observer.end(os.getpid())
