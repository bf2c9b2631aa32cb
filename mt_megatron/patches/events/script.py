"""Report a script's process groups, schedules and optimizer updates to the observer in ``seams.script``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch
from mt_megatron.seams import script


def _groups_made(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    if script.observer is not None:
        script.observer.groups_made()


def _groups_end(original: Callable[[], None]) -> None:
    if script.observer is not None:
        script.observer.groups_end()
    original()


def _schedule(original: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    run = original()
    return run if script.observer is None else partial(_observed, run)


def _observed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Of now: a script may keep the function.
    if script.observer is None:
        return run(*args, **kwargs)
    return script.observer.schedule(run, *args, **kwargs)


def _update(original: Callable[[Any], Any], self: Any) -> Any:
    return original(self) if script.observer is None else script.observer.update(self, original)


def _prepare_grads(original: Callable[[Any], bool], self: Any) -> bool:
    overflowed = original(self)
    if script.observer is not None and not overflowed:
        script.observer.gradients_ready(self)
    return overflowed


def _scheduled(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if script.observer is not None:
        script.observer.scheduled(self)


def patches(backend: Backend) -> list[Patch]:
    def wrap(target: str, body: Callable[..., Any], digest: str) -> Patch:
        return Patch(
            id=f"script.{target.rpartition(':')[2]}",
            target=f"megatron.core.{target}",
            kind="wrap",
            feature="events",
            reason="the recording of an unmodified script takes its steps from this call",
            body=body,
            digest=digest,
        )

    optimizer, mixed, single, chained = (
        "optimizer.optimizer:",
        "MixedPrecisionOptimizer",
        "FP32Optimizer",
        "ChainedOptimizer",
    )
    return [
        wrap(
            "parallel_state:initialize_model_parallel",
            _groups_made,
            "35db5de0f1a2cad23ad9ae97e8c4b8f6acc2c6c8d34316a038493d626f1773e1",
        ),
        wrap(
            "parallel_state:destroy_model_parallel",
            _groups_end,
            "2e17a04aa396c4f23415e19ad10a3f6ac5a2d4b855c40dce8bb565e841395bd4",
        ),
        wrap(
            "pipeline_parallel.schedules:get_forward_backward_func",
            _schedule,
            "821ba5e9d88d38b49d4dec08c9f75fe77b3811de48678917a2f14df8a4794230",
        ),
        wrap(
            f"{optimizer}{mixed}.step",
            _update,
            "5946ee169e29a9102be5507626bfe7abd8bb4de42f207afa973ebf3e81b51418",
        ),
        wrap(
            f"{optimizer}{single}.step",
            _update,
            "5946ee169e29a9102be5507626bfe7abd8bb4de42f207afa973ebf3e81b51418",
        ),
        wrap(
            f"{optimizer}{chained}.step",
            _update,
            "0d1eda221dcfc8d71186231b4c4e3d3e69bec9a7d1d9bfd8e23f88a737b0ec42",
        ),
        wrap(
            f"{optimizer}{mixed}.prepare_grads",
            _prepare_grads,
            "b76912ec7aee2d451ed3531ffabb3aef66b775ebcff8eecd40d716ae353cacca",
        ),
        wrap(
            f"{optimizer}{single}.prepare_grads",
            _prepare_grads,
            "3702296d3d62a14942d0a0aaa86b3c6b7f53bd2f77b9b2a746f6cbf5bf1f9611",
        ),
        wrap(
            f"{optimizer}{chained}.prepare_grads",
            _prepare_grads,
            "cab0b8c1d4b485069ec18417179a20129e293383309ffc3ae38b5b9fe09dd7cf",
        ),
        wrap(
            "optimizer_param_scheduler:OptimizerParamScheduler.step",
            _scheduled,
            "dc730d16c25958511d358651abcadbbf944ef01ec8f833afc1fb828e149a9adb",
        ),
    ]
