"""The ranks' side of the tests of divergence: many short runs with faults, in one start of the ranks."""

from __future__ import annotations

from typing import Any

from mt_megatron.training import nan_watch, step
from tests.training.faults import injected
from tests.training.loop_cases import run, start

SMALL = "--global-batch-size 4 --micro-batch-size 1 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"


def runs(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each case is ``flags``, perhaps a ``fault``, and perhaps ``then``: flags of a second run of it."""
    start()
    found: dict[str, Any] = {}
    for name, case in cases.items():
        flags = f"{SMALL} --save {folder}/{name} {case['flags']}"
        with injected(case.get("fault")):
            found[name] = run(flags, folder, name)
            if "then" in case:
                found[f"{name}_then"] = run(f"{flags} {case['then']}", folder, f"{name}_then")
    return found


def fp8_of_a_step_left_out(folder: str, policy: str) -> list[list[Any]]:
    """After each step, of which the fourth diverges: iteration, the FP8 state's step and its rows."""
    from mt_megatron.fp8.state import states_of
    from mt_megatron.training.steps import Steps

    start()
    found: list[list[Any]] = []
    take = Steps.take

    def watched(self: Any, wishes: Any) -> Any:
        result = take(self, wishes)
        [state] = states_of(self._trainable.chunks)
        rows = {name: state.row(name).tolist() for name in state.linears}
        found.append([self.progress.iteration, state.step, rows])
        return result

    flags = "--fp8-recipe delayed --fp8-amax-history-len 4 --no-first-last-layers-bf16 --train-iters 6 "
    flags += f"--on-divergence {policy} --save-interval 2 --save {folder}/{policy}"
    fault = {"module": "decoder.layers.0.mlp", "kind": "backward", "value": "nan", "steps": [4], "rank": 0}
    Steps.take = watched  # type: ignore[method-assign]
    with injected(fault):
        error = run(f"{SMALL} {flags}", folder, policy).get("error")
    Steps.take = take  # type: ignore[method-assign]
    assert error is None, error
    return found


def runs_and_repetitions(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``runs``, and what a repeated step loses with and without its random states."""
    found = runs(folder, cases)
    return {**found, "restored": _repeated(folder, True), "not_restored": _repeated(folder, False)}


def _repeated(folder: str, restores: bool) -> list[list[float]]:
    """The losses of two steps with dropout, the second with a spoilt gradient, and of its repetition."""
    losses: list[list[float]] = []
    original, restore = step.forward_backward, nan_watch.RandomStates.restore

    def recorded(*args: Any) -> Any:
        reports = original(*args)
        losses.append([float(report["loss"]) for report in reports])
        return reports

    step.forward_backward = nan_watch.forward_backward = recorded
    if not restores:
        nan_watch.RandomStates.restore = lambda *ignored: None
    fault = {"module": "decoder.layers.0.mlp", "kind": "backward", "value": "nan", "steps": [2], "rank": 0}
    name = f"dropout_{restores}"
    with injected(fault):
        run(f"{SMALL} --hidden-dropout 0.2 --save {folder}/{name}", folder, name)
    step.forward_backward = nan_watch.forward_backward = original
    nan_watch.RandomStates.restore = restore
    return losses
