"""On the CPU the device's random numbers are a stream of their own: where they are drawn, it is in use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_RANDOM = "megatron.core.tensor_parallel.random"
_CPU = frozenset({"cpu"})


def _module_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    from mt_megatron.backends.cpu.rng import device_generator

    device = device_generator()
    if device.is_in_use:
        return torch.nn.Module.__call__(self, *args, **kwargs)
    with device.in_use():
        return torch.nn.Module.__call__(self, *args, **kwargs)


def _fork(
    original: Callable[..., AbstractContextManager[None]], self: Any, name: str = "model-parallel-rng"
) -> AbstractContextManager[None]:
    from mt_megatron.backends.cpu.rng import device_generator

    @contextmanager
    def forked() -> Any:
        with device_generator().in_use(), original(self, name):
            yield

    return forked()


def _on_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from mt_megatron.backends.cpu.rng import device_generator

    with device_generator().in_use():
        return original(*args, **kwargs)


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad``."""
    return functools.wraps(original)(partial(_on_device, original))


def _recomputed(
    original: Callable[..., Any], ctx: Any, run_function: Any, distribute_saved_activations: bool, *args: Any
) -> Any:
    return _on_device(original, ctx, run_function, distribute_saved_activations, *args)


def _seed(original: Callable[..., None], seed: Any) -> None:
    """``torch.manual_seed`` seeds every device beside the host."""
    from mt_megatron.backends.cpu.rng import device_generator

    original(seed)
    device_generator().seed_all(int(seed))


def patches(backend: Backend) -> list[Patch]:
    def region(name: str, target: str, reason: str, body: Any, digest: str | None = None) -> Patch:
        return Patch(
            id=f"rng.{name}",
            target=target,
            kind="wrap",
            feature="device",
            backends=_CPU,
            reason=reason,
            body=body,
            digest=digest,
        )

    return [
        Patch(
            id="rng.module_calls",
            target="megatron.core.transformer.module:MegatronModule.__call__",
            kind="add",
            feature="device",
            backends=_CPU,
            reason="what a module draws, dropout above all, is drawn on the device",
            body=_module_call,
        ),
        region(
            "forks",
            f"{_RANDOM}:CudaRNGStatesTracker.fork",
            "it exchanges the device's state: what is drawn within is drawn on the device",
            _fork,
            "ad1fa44b31f8764f54b6ba14dfff98d0ed9d2f493b64170b7a6c2f5003b2b9fd",
        ),
        region(
            "recomputed_forward",
            f"{_RANDOM}:CheckpointFunction.forward",
            "the function that is recomputed later draws on the device both times",
            _recomputed,
            "4902e6427316049dfbda728d39ae962a4349b79987aa9bab977fb51e8b0ec1e3",
        ),
        region(
            "backward_step",
            "megatron.core.pipeline_parallel.schedules:backward_step",
            "what a backward pass recomputes is drawn on the device",
            _on_device,
            "b3d4907e86ce24887e0b03660e449d22cc3c382dcc7cf2bd092e298ff7c43806",
        ),
        region(
            "torch_checkpoint",
            "torch.utils.checkpoint:checkpoint",
            "the function that is recomputed later draws on the device both times",
            _on_device,
        ),
        Patch(
            id="rng.backward",
            target="torch.autograd:_engine_run_backward",
            kind="value",
            feature="device",
            backends=_CPU,
            reason="what a backward pass recomputes is drawn on the device",
            body=_backward,
        ),
        region(
            "seeds",
            "torch.random:_seed_custom_device",
            "torch.manual_seed seeds the devices beside the host",
            _seed,
        ),
    ]
